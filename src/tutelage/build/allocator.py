"""Memory that a process on a CPU has freed stays its own, so that it is not handed out page by page again.

glibc gives large blocks back to the system as they are freed (man 3 mallopt), and the next tensor's every 4 KiB page is
then cleared by the kernel when it is first written: a tenth of the time of an update (docs/results/compare.md).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEPT_BYTES = 1 << 30
"""Free memory at the top of the heap; more is given back."""
CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let glibc take every block from the heap and keep up to KEPT_BYTES of what is freed. Whether it will.

    Left as it is, False: without glibc, and where the environment says anything of these settings (MALLOC_..._,
    GLIBC_TUNABLES) or puts another allocator in place (LD_PRELOAD).
    """
    chosen = [name for name in (*CHOSEN_BY_USER, "GLIBC_TUNABLES", "LD_PRELOAD") if environment.get(name)]
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return mallopt(M_MMAP_MAX, 0) == 1 and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) == 1
