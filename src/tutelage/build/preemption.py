"""SIGTERM, which SLURM, Kubernetes and cloud machines send before they take a machine away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_sigterm(leave: Callable[[str], None]) -> Iterator[None]:
    """Inside, the first SIGTERM calls `leave(reason)`; the second one ends the process as usual.

    Outside the main thread, where Python delivers no signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        leave("SIGTERM came")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
