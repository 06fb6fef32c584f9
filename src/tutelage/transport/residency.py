"""How much memory a process holds, and the most it held since the last question.  Torch-free.

A mark is the largest resident size since it was set.  There are three kinds, the best that a system allows is used:

    reset     Linux.  The kernel keeps the mark (VmHWM), and writing 5 to /proc/self/clear_refs sets it (proc(5)).
    sampled   Linux where that is not permitted.  A thread reads the size every 10 ms; what is shorter may be missed.
    run-wide  elsewhere.  The kernel's mark since the process began (getrusage(2)), which nobody can set.

Setting the kernel's mark moves what VmHWM and ru_maxrss say to everybody else: ask `ProcessMemory.peak` for the largest
size of a process whose calls are measured.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

PROC = Path("/proc/self")
SAMPLE_EVERY = 0.01
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class Mark(Protocol):
    """kind: one of the three; take: bytes, the largest resident size since the last `take`."""

    kind: str

    def take(self) -> int: ...


class ResetMark:
    """Raises OSError where the system does not let the mark be read and set."""

    kind = "reset"

    def __init__(self, proc: Path = PROC) -> None:
        """The mark is read and left as it is: the first `take` tells of all before it."""
        self._status, self._clear = str(proc / "status"), str(proc / "clear_refs")
        self.read()
        os.close(os.open(self._clear, os.O_WRONLY))

    def read(self) -> int:
        """Files are opened anew: /proc/self of an open one stays the process that opened it, across a fork too."""
        text = _read(self._status)
        start = text.find(b"VmHWM:")
        if start < 0:
            raise OSError(f"{self._status} has no VmHWM")
        return int(text[start + 6 : text.index(b"kB", start)]) * 1024

    def take(self) -> int:
        most = self.read()
        file = os.open(self._clear, os.O_WRONLY)
        try:
            os.write(file, b"5")
        finally:
            os.close(file)
        return most


class SampledMark:
    """The thread starts with the first question and ends with the process."""

    kind = "sampled"

    def __init__(self, proc: Path = PROC) -> None:
        """Raises OSError where the size cannot be read."""
        self._statm = str(proc / "statm")
        self._most = resident(self._statm)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self) -> int:
        if self._thread is None or not self._thread.is_alive():  # a fork does not take threads along
            self._thread = threading.Thread(target=self._sample, name="resident size", daemon=True)
            self._thread.start()
        here = resident(self._statm)
        with self._lock:
            most, self._most = max(self._most, here), here
        return most

    def _sample(self) -> None:
        while True:
            here = resident(self._statm)
            with self._lock:
                self._most = max(self._most, here)
            time.sleep(SAMPLE_EVERY)


class RunWideMark:
    """The largest size since the process began."""

    kind = "run-wide"

    def take(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def best_mark(proc: Path = PROC, kinds: tuple[Callable[[Path], Mark], ...] = (ResetMark, SampledMark)) -> Mark:
    """The first of these kinds that this system allows, else the run-wide mark."""
    for make in kinds:
        try:
            return make(proc)
        except OSError:
            continue
    return RunWideMark()


class ProcessMemory:
    """most: bytes, the largest of what the mark has said.

    A system may let the mark's file be opened and still refuse to set it: then a thread samples from there on.
    """

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.most = 0

    def take(self) -> int:
        """Bytes: the largest resident size since the last question."""
        try:
            peak = self.mark.take()
        except OSError:
            self.mark = best_mark(kinds=(SampledMark,))
            peak = self.mark.take()
        self.most = max(self.most, peak)
        return peak

    def peak(self) -> int:
        """Bytes: the largest resident size of the process so far."""
        if self.mark.kind == "reset":  # read, not set: what runs keeps its mark
            return max(self.most, _high_water())
        return max(self.most, RunWideMark().take())


@functools.cache
def process_memory() -> ProcessMemory:
    """Of this process: one for all who ask, since the kernel keeps one mark."""
    return ProcessMemory(best_mark())


def present_size() -> int:
    """Bytes that are resident at this moment; where that cannot be read, the most that ever were."""
    return resident() if (PROC / "statm").is_file() else RunWideMark().take()


def resident(statm: str = str(PROC / "statm")) -> int:
    """Bytes that are resident at this moment (Linux)."""
    return int(_read(statm).split()[1]) * resource.getpagesize()


def _high_water() -> int:
    text = _read(str(PROC / "status"))
    start = text.index(b"VmHWM:")
    return int(text[start + 6 : text.index(b"kB", start)]) * 1024


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 8192)
    finally:
        os.close(file)
