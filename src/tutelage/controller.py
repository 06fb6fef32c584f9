"""The run loop of every algorithm: step, watch, evaluate, checkpoint, finish; and the same from a checkpoint."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tutelage.alarms import Alarms
from tutelage.checkpoints import Checkpoints
from tutelage.errors import TutelageError
from tutelage.evals.evaluation import Evaluation, Evaluator
from tutelage.protocols import BatchSource, Tracker
from tutelage.reports.display import Display
from tutelage.reports.metrics_log import MetricsLog
from tutelage.runfolder import write_json
from tutelage.schedules import Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Stats

RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass
class Controller:
    """One run.  `learners` are the names of the roles whose state a checkpoint holds; `finish` is the algorithm's last
    word after the last update (such as centring a reward model), its result goes into the summary.
    """

    folder: Path
    total_steps: int
    schedule: Synchronous
    transport: LocalTransport
    roles: RoleSet
    learners: tuple[str, ...]
    source: BatchSource
    make_batch: Callable[[Tensor, int], Any]
    evaluator: Evaluator | None
    evaluate_every: int
    checkpoints: Checkpoints
    checkpoint_every: int
    alarms: Alarms | None
    log: MetricsLog
    display: Display
    trackers: Sequence[Tracker]
    finish: Callable[[], Mapping[str, Any]] | None = None
    done: int = 0
    state: Any = None
    stopped: str = ""
    started: float = 0.0
    seconds_before: float = 0.0
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Train to the end; returns what summary.json holds."""
        self.started = time.perf_counter()
        self.display.start()
        try:
            if self.done == 0:
                self.evaluate("before")
            for index in self.remaining():
                self.step(index)
                if self.stopped:
                    break
            summary = self.finished()
        except TutelageError as error:
            with contextlib.suppress(TutelageError):  # a full disk must not hide what went wrong
                self.log.event(self.done, "error", str(error))
            raise
        finally:
            self.display.close()
            self.log.close()
            for tracker in self.trackers:
                tracker.close()
        self.display.finish(summary)
        return summary

    def remaining(self) -> Iterator[Tensor]:
        for index in self.source:
            if self.stopped or self.done >= self.total_steps:
                return
            yield index
            if self.done >= self.total_steps:
                return

    def step(self, index: Tensor) -> None:
        """One training step and everything that hangs on it; a message names the step when it fails."""
        start = time.perf_counter()
        try:
            result = self.schedule.step(self.make_batch(index, self.done), self.state)
        except TutelageError as error:
            error.add_note(f"at step {self.done + 1} of {self.total_steps}")
            raise
        self.state = result.state
        self.done += 1
        metrics = {name: stat.mean for name, stat in result.stats.items()}
        metrics.update(self.costs(result.stats, time.perf_counter() - start))
        if self.alarms is not None:
            for alarm in self.alarms.check(metrics):
                self.log.event(self.done, alarm.kind, alarm.message)
                self.display.event(alarm.kind, alarm.message)
                if alarm.stop:
                    self.stopped = alarm.message
        last = self.stopped or self.done >= self.total_steps
        if self.evaluate_every and self.done % self.evaluate_every == 0 and not last:
            metrics.update(self.evaluate("step"))
        self.record(metrics)
        if self.checkpoint_every and self.done % self.checkpoint_every == 0 and not last:
            self.checkpoint()

    def costs(self, stats: Stats, seconds: float) -> dict[str, float]:
        """Time, throughput and memory of a step."""
        spent = self.transport.take_seconds()
        out = {"time/step_s": seconds, "memory/peak_rss_gb": peak_rss() / 1e9}
        tokens = next((stats[n].total for n in ("rollout/tokens", "data/trained_tokens") if n in stats), None)
        if tokens is not None:
            out["time/tokens_per_s"] = tokens / seconds
        if ("actor", "generate") in spent:
            out["time/rollout_s"] = spent["actor", "generate"]
        return out

    def record(self, metrics: Mapping[str, float]) -> None:
        self.log.log(self.done, metrics)
        for tracker in self.trackers:
            tracker.log(self.done, metrics)
        self.display.step(self.done, metrics)

    def evaluate(self, phase: str) -> dict[str, float]:
        """Held-out quality; the best model so far is kept by it."""
        if self.evaluator is None:
            return {}
        self.display.phase("evaluation", 0, 1)
        try:
            found: Evaluation = self.evaluator.evaluate(phase, self.done)
        except TutelageError as error:
            error.add_note(f"in the evaluation after step {self.done}" if self.done else "in the first evaluation")
            raise
        self.display.phase("evaluation", 1, 1)
        self.transport.take_seconds()
        if phase != "step":
            self.evaluations[phase] = {**found.metrics, **found.details}
        if phase != "before":
            role = getattr(self.roles, self.checkpoints.exported)
            self.checkpoints.save_best(self.done, role, found.quality, found.measured_by)
        else:
            self.record(found.metrics)
        return dict(found.metrics)

    def checkpoint(self) -> None:
        handles = {name: getattr(self.roles, name) for name in self.learners}
        state = {
            "done": self.done,
            "stopped": self.stopped,
            "seconds": self.seconds(),
            "algorithm": self.state.state_dict(),
            "source": self.source.state(),
            "alarms": self.alarms.state() if self.alarms else {},
            "evaluator": {} if self.evaluator is None else self.evaluator.state(),
            "evaluations": self.evaluations,
        }
        path = self.checkpoints.save(self.done, handles, state)
        self.display.event("checkpoint", str(path))

    def restore(self, path: Path, state_from: Callable[[Mapping[str, Any]], Any]) -> None:
        """Continue from a checkpoint: later metrics are dropped, they will be taken again."""
        handles = {name: getattr(self.roles, name) for name in self.learners}
        saved = self.checkpoints.load(path, handles)
        self.done, self.stopped, self.seconds_before = saved["done"], saved["stopped"], saved["seconds"]
        self.state = state_from(saved["algorithm"])
        self.source.load_state(saved["source"])
        self.evaluations = saved["evaluations"]
        if self.alarms is not None:
            self.alarms.load_state(saved["alarms"])
        if self.evaluator is not None:
            self.evaluator.load_state(saved["evaluator"])
        dropped = self.log.truncate_after(self.done)
        self.log.event(self.done, "resume", f"resumed from {path.name}; {dropped} later steps are taken again")
        if "actor" in self.schedule.algorithm.PUBLISHED:
            self.roles.actor.publish(self.done).gather()

    def seconds(self) -> float:
        """Of this run so far, resumed parts added up."""
        return self.seconds_before + time.perf_counter() - self.started

    def finished(self) -> dict[str, Any]:
        """The last checkpoint, so that what fails after it can be resumed; then the last evaluation and the summary."""
        self.checkpoint()
        extra = dict(self.finish()) if self.finish else {}
        after = self.evaluate("after")
        if after:
            self.record(after)
        else:
            role = getattr(self.roles, self.checkpoints.exported)
            self.checkpoints.save_best(self.done, role, float(self.done), "the last step: nothing is held out")
        summary = {
            "run": str(self.folder),
            "steps": self.done,
            "seconds": round(self.seconds(), 1),
            "stopped": self.stopped or None,
            **self.evaluations,
            **extra,
        }
        write_json(self.folder / "summary.json", summary)
        return summary


def peak_rss() -> int:
    """Bytes of the process's largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
