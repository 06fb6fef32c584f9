"""What is asked of an engine, and what its answers are put together from, whatever way they come.

An engine reports tokens as they are sampled.  The stop rules are applied here, token by token, by the same code as in
the in-process engine, so that both end a response at the same token.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tutelage.errors import RolloutError
from tutelage.rollout.inprocess.stopping import Decoder, Stopping
from tutelage.rollout.partial import Limit
from tutelage.rollout.sampling import SamplingParams


@dataclass(frozen=True)
class Job:
    """A response to begin or to continue.

    tokens  prompt and response so far;  response  the response so far;  room  tokens it may still get.
    """

    name: str
    tokens: tuple[int, ...]
    response: tuple[int, ...]
    seed: int
    room: int


class Backend(Protocol):
    """An engine that vLLM runs somewhere.

    run     hands every new token to the collector until all jobs are over or the collector has enough; what is still
            running then is aborted.
    rpc     calls a method of every worker (vLLM's, or one of `worker.WorkerExtension`) and returns their replies.
    """

    max_model_len: int

    def run(
        self, jobs: Sequence[Job], params: SamplingParams, stop_ids: Sequence[int], collector: Collector
    ) -> None: ...
    def rpc(self, method: str, kwargs: dict[str, Any], timeout: float | None = None) -> list[Any]: ...
    def load(self, named: Any) -> None: ...
    def load_adapter(self, folder: str) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def sleep(self, level: int) -> None: ...
    def wake(self, tag: str) -> None: ...
    def close(self) -> None: ...


class Collector:
    """New tokens and logprobs of each job, and whether it is over; safe to call from several threads.

    report  called with the number of jobs that are over, each time one more is.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        params: SamplingParams,
        decoder: Decoder,
        stop_ids: Sequence[int],
        limit: Limit,
        report: Callable[[int], None],
    ) -> None:
        self.jobs = jobs
        self.tokens: list[list[int]] = [[] for _ in jobs]
        self.logps: list[list[float]] = [[] for _ in jobs]
        self.ended = [False] * len(jobs)
        self.over = [False] * len(jobs)
        self._limit = limit
        self._report = report
        self._stop_ids = frozenset(stop_ids)
        self._strings = Stopping(decoder, (), params.stop, torch.device("cpu")) if params.stop else None
        self._lock = threading.Lock()
        self._done = 0

    def take(self, index: int, tokens: Sequence[int], logps: Sequence[float]) -> bool:
        """Add sampled tokens of a job; whether it is over.  Tokens after its end are dropped.

        Raises RolloutError, naming the prompt, for a logprob that is not finite.
        """
        with self._lock:
            for token, logp in zip(tokens, logps, strict=True):
                if self.over[index]:
                    break
                if not math.isfinite(logp):
                    self._refuse(index)
                self.tokens[index].append(token)
                self.logps[index].append(logp)
                self._limit.sampled += 1
                self.ended[index] = token in self._stop_ids or self._completes_a_string(index)
                self.over[index] = self.ended[index] or len(self.tokens[index]) >= self.jobs[index].room
                if self.over[index]:
                    self._done += 1
                    self._report(self._done)
            return self.over[index]

    def enough(self) -> bool:
        """Whether generation must stop: the budget is used up, or `should_stop` says so."""
        with self._lock:
            return self._limit.reached()

    def _completes_a_string(self, index: int) -> bool:
        if self._strings is None:
            return False
        row = torch.tensor([[*self.jobs[index].response, *self.tokens[index]]])
        one = torch.tensor([0])
        return bool(self._strings.ended(row[0, -1:], row, one, torch.tensor([True]), row.shape[1]))

    def _refuse(self, index: int) -> None:
        job = self.jobs[index]
        at = len(job.response) + len(self.tokens[index])
        raise RolloutError(
            f"the logits for prompt {job.name!r} are not finite at response token {at}",
            fix="the weights hold NaN or infinity, or overflow in this dtype: look at the last updates, or use float32",
        )
