"""Environments at work: many at the same time, each with a deadline, none of which can hold up the others for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """value: what the call returned.  error: what went wrong, in words; "" where nothing did."""

    value: Any = None
    error: str = ""


@dataclass
class _Work:
    call: Callable[[], Any]
    outcome: Outcome
    began: float | None = None
    over: bool = False


class Steps:
    """Runs calls in threads, `workers` of them at a time, each for at most `seconds` from its own begin.

    A call that is late fails, and its place is given to the next: a thread cannot be stopped, so it goes on unheard
    and dies with the process.  Calls of one batch must not depend on each other's order.
    """

    def __init__(self, seconds: float, workers: int) -> None:
        self.seconds = seconds
        self.workers = workers

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Outcome]:
        """Outcomes in the order of the calls; no exception of a call comes through."""
        works = [_Work(call, Outcome()) for call in calls]
        changed = threading.Condition()
        waiting = iter(works)
        running: list[_Work] = []
        left = len(works)

        def begin() -> None:
            """Under the lock: fill the places that are free."""
            while len(running) < self.workers and (work := next(waiting, None)) is not None:
                work.began = time.monotonic()
                running.append(work)
                threading.Thread(target=self._work, args=(work, changed), daemon=True, name="environment").start()

        with changed:
            begin()
            while left:
                now = time.monotonic()
                for work in [w for w in running if w.over or self._late(w, now)]:
                    if not work.over:
                        work.over = True
                        work.outcome = Outcome(error=f"no answer within {self.seconds:g} s")
                    running.remove(work)
                    left -= 1
                begin()
                if left and not any(w.over for w in running):
                    changed.wait(min(self._remaining(w) for w in running))
        return [work.outcome for work in works]

    def _remaining(self, work: _Work) -> float:
        assert work.began is not None
        return max(0.0, work.began + self.seconds - time.monotonic()) + 1e-3

    def _late(self, work: _Work, now: float) -> bool:
        return work.began is not None and now >= work.began + self.seconds

    @staticmethod
    def _work(work: _Work, changed: threading.Condition) -> None:
        try:
            found = Outcome(work.call())
        except BaseException as error:  # a SystemExit of a library too ends the episode, not the run
            found = Outcome(error=f"{type(error).__name__}: {getattr(error, 'what', None) or error}")
        with changed:
            if not work.over:  # too late otherwise: nobody listens
                work.outcome, work.over = found, True
                changed.notify()
