"""The run loop of every algorithm: step, watch, evaluate, checkpoint, finish; and the same from a checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tutelage.alarms import Watching
from tutelage.checkpoints import Checkpoints, load_plain, save_plain
from tutelage.engines.state import flatten
from tutelage.errors import CheckpointError, ClusterError, PreemptedError, TutelageError
from tutelage.evals.evaluation import Evaluation, Evaluator
from tutelage.mirror import Mirror
from tutelage.protocols import BatchSource, Tracker, Transport
from tutelage.reports.display import Display
from tutelage.reports.metrics_log import MetricsLog, read_events
from tutelage.reports.resources import RESOURCES
from tutelage.runfolder import write_json
from tutelage.schedules import Schedule
from tutelage.transport.account import Account, Spent
from tutelage.transport.metering import CONTROLLER
from tutelage.transport.residency import process_memory
from tutelage.transport.roleset import RoleSet
from tutelage.types import Stats

GENERATION = ("generate", "generate_partial", "next_part")
PUBLICATION = (("publish",), ("send_weights", "receive"), ("whole_weights",), ("load_weights",))
"""Calls that publish weights; those in one entry run at the same time."""
SCHEDULE = "schedule"


@dataclass(frozen=True)
class Gathered:
    """A result that is there."""

    value: Any

    def gather(self) -> Any:
        return self.value


@dataclass(frozen=True)
class BegunAhead:
    """What a schedule has begun ahead, as a checkpoint sees a role."""

    schedule: Schedule

    def save_state(self, folder: Path) -> Gathered:
        save_plain(folder, self.schedule.state())
        return Gathered(None)

    def load_state(self, folder: Path) -> Gathered:
        self.schedule.load_state(load_plain(folder))
        return Gathered(None)

    def checkpoint_bytes(self) -> Gathered:
        tensors, _ = flatten(self.schedule.state())
        return Gathered(sum(tensor.nbytes for tensor in tensors.values()))


@dataclass
class Controller:
    """One run.  `learners` are the names of the roles whose state a checkpoint holds; `finish` is the algorithm's last
    word after the last update (such as centring a reward model), its result goes into the summary.

    done: steps that are learned.  drawn: batches taken from the source, which a schedule may do ahead.
    after_step: called with the steps done, such as to keep what a role noted meanwhile.
    rebuild: starts lost pools again, their roles as at the start of the run, and says where; restarts: how often that
    may happen.
    account: what the calls of the roles took, over the whole run.
    """

    folder: Path
    total_steps: int
    schedule: Schedule
    transport: Transport
    roles: RoleSet
    learners: tuple[str, ...]
    source: BatchSource
    make_batch: Callable[[Tensor, int], Any]
    evaluator: Evaluator | None
    evaluate_every: int
    checkpoints: Checkpoints
    checkpoint_every: int
    alarms: Watching | None
    log: MetricsLog
    display: Display
    trackers: Sequence[Tracker]
    finish: Callable[[], Mapping[str, Any]] | None = None
    mirror: Mirror | None = None
    rebuild: Callable[[ClusterError], str] | None = None
    after_step: Callable[[int], Any] | None = None
    restarts: int = 0
    done: int = 0
    drawn: int = 0
    state: Any = None
    stopped: str = ""
    leaving: str = ""
    batches: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    started: float = 0.0
    seconds_before: float = 0.0
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    account: Account = field(default_factory=Account)

    def run(self) -> dict[str, Any]:
        """Train to the end; returns what summary.json holds."""
        self.display.start()
        try:
            self.begin_account(self.account.state())
            if self.done == 0:
                self.evaluate("before")
            self.batches = iter(self.source)
            while not self.stopped and not self.leaving and self.done < self.total_steps and self.step_or_recover():
                pass
            if self.leaving:
                self.leave_now()
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

    def leave(self, reason: str) -> None:
        """Write a checkpoint after the step that runs and end with PreemptedError; may be called by a signal."""
        self.leaving = reason

    def leave_now(self) -> None:
        self.checkpoint(measure=False)  # nothing but what is saved may use up the time that is left
        raise PreemptedError(
            f"{self.leaving} after step {self.done} of {self.total_steps}; everything up to it is in a checkpoint",
            fix=f"tutelage resume {self.folder}",
        )

    def step_or_recover(self) -> bool:
        """`step`; where it lost a part of the cluster, the run goes on from its last checkpoint, `restarts` times."""
        try:
            return self.step()
        except ClusterError as error:
            latest = self.checkpoints.latest()
            if self.rebuild is None or not error.pool or self.restarts == 0 or latest is None:
                raise
            self.restarts -= 1
            said = f"{error.what}; pool {error.pool} starts again, the run goes on from {latest.name}"
            self.display.event("restart", said)
            try:
                where = self.rebuild(error)
            except TutelageError as failed:
                failed.add_note(f"while pool {error.pool} was started again after this: {error.what}")
                raise
            self.restore(latest, self.schedule.algorithm.state_from)
            self.log.event(self.done, "restart", f"{said}; {where}")  # after `restore`, which drops later events
            self.batches = iter(self.source)
            return True

    def draw(self) -> Any | None:
        """The next batch of the data, numbered by its place in it.

        None past the last step of the run; where a step may draw several, past the end of the data.
        """
        more = self.schedule.refills > 0 or self.drawn < self.total_steps
        index = next(self.batches, None) if more else None
        if index is None:
            return None
        self.drawn += 1
        return self.make_batch(index, self.drawn - 1)

    def step(self) -> bool:
        """One training step and everything that hangs on it; a message names the step when it fails.

        False: the data has no batch left.
        """
        start = time.perf_counter()
        try:
            result = self.schedule.advance(self.draw, self.state)
        except TutelageError as error:
            error.add_note(f"at step {self.done + 1} of {self.total_steps}")
            raise
        if result is None:
            if self.schedule.refills:
                said = f"the data has no prompts left after step {self.done} of {self.total_steps}"
                self.log.event(self.done, "refill", said)
                self.display.event("refill", said)
            return False
        self.state = result.state
        self.done += 1
        if self.after_step is not None:
            self.after_step(self.done)
        for note in result.notes:
            self.log.event(self.done, "refill", note)
            self.display.event("refill", note)
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
        return True

    def begin_account(self, saved: Mapping[str, Any]) -> None:
        """The sums go on from these; what calls took before, such as to load weights, is not of the run."""
        self.account.measure(self.roles)
        self.spent()
        self.account.load_state(saved, self.seconds_before)
        self.started = time.perf_counter()

    def spent(self) -> tuple[Spent, dict[str, float]]:
        """Seconds of calls and of pools since the last question; the former are added to those of the run."""
        return self.account.spend(self.transport.take_seconds()), self.transport.take_busy()

    def costs(self, stats: Stats, seconds: float) -> dict[str, float]:
        """Time, throughput and memory of a step."""
        spent, pools = self.spent()
        out = {"time/step_s": seconds, "memory/peak_rss_gb": process_memory().peak() / 1e9}
        calls = {key: took for key, took in spent.items() if key[0] != CONTROLLER}
        out |= {f"time/{role}/{call}": took for (role, call), took in calls.items()}
        out["time/other"] = max(0.0, seconds - sum(calls.values()))
        tokens = next((stats[n].total for n in ("rollout/tokens", "data/trained_tokens") if n in stats), None)
        if tokens is not None:
            out["time/tokens_per_s"] = tokens / seconds
            for role in self.roles.names():
                busy = sum(spent_s for (name, _), spent_s in spent.items() if name == role)
                if busy > 0:
                    out[f"time/tokens_per_s/{role}"] = tokens / busy
        generation = [took for (_, method), took in spent.items() if method in GENERATION]
        if generation:
            out["time/rollout_s"] = sum(generation)
        moved = [[took for (_, method), took in spent.items() if method in together] for together in PUBLICATION]
        if any(moved):
            out["time/sync_s"] = sum(max(took) for took in moved if took)
        for pool, busy in pools.items():
            out[f"time/bubble/{pool}"] = max(0.0, 1.0 - busy / seconds)
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
        if phase != "step":
            self.evaluations[phase] = {**found.metrics, **found.details}
        if phase != "before":
            role = getattr(self.roles, self.checkpoints.exported)
            self.checkpoints.save_best(self.done, role, found.quality, found.measured_by)
        else:
            self.record(found.metrics)
        self.spent()  # not of the next step
        return dict(found.metrics)

    def checkpoint(self, measure: bool = True) -> None:
        """measure: ask the ranks first what their calls took; one that does not answer does not keep it from being
        written."""
        if measure:
            self.account.measure(self.roles, self.unmeasured)
        state = {
            "done": self.done,
            "drawn": self.drawn,
            "stopped": self.stopped,
            "seconds": self.seconds(),
            "algorithm": self.state.state_dict(),
            "source": self.source.state(),
            "alarms": self.alarms.state() if self.alarms else {},
            "evaluator": {} if self.evaluator is None else self.evaluator.state(),
            "evaluations": self.evaluations,
            "account": self.account.state(),
        }
        path = self.checkpoints.save(self.done, self.stateful(), state)
        self.spent()  # not of the next step
        self.display.event("checkpoint", str(path))
        if self.mirror is not None:
            self.copy_out(self.mirror)

    def copy_out(self, mirror: Mirror) -> None:
        """Bring the copy up to date.  The run does not end because a store does not answer; it says so."""
        try:
            mirror.push(self.folder)
        except CheckpointError as error:
            self.log.event(self.done, "mirror", str(error))
            self.display.event("mirror", str(error))

    def restore(self, path: Path, state_from: Callable[[Mapping[str, Any]], Any]) -> None:
        """Continue from a checkpoint: later metrics are dropped, they will be taken again."""
        saved = self.checkpoints.load(path, self.stateful())
        self.done, self.stopped, self.seconds_before = saved["done"], saved["stopped"], saved["seconds"]
        self.drawn = saved.get("drawn", saved["done"])
        self.state = state_from(saved["algorithm"])
        self.source.load_state(saved["source"])
        self.evaluations = saved["evaluations"]
        if self.alarms is not None:
            self.alarms.load_state(saved["alarms"])
        if self.evaluator is not None:
            self.evaluator.load_state(saved["evaluator"])
        ended = [event["message"] for event in read_events(self.folder) if event["kind"] == "error"]
        dropped = self.log.truncate_after(self.done)
        if ended and ended[-1] not in [event["message"] for event in read_events(self.folder)]:
            self.log.event(self.done, "error", ended[-1])  # why it had stopped stays on record
        self.log.event(self.done, "resume", f"resumed from {path.name}; {dropped} later steps are taken again")
        if "actor" in self.schedule.algorithm.PUBLISHED:
            self.roles.actor.publish(self.done).gather()
        self.begin_account(saved.get("account", {}))

    def stateful(self) -> dict[str, Any]:
        """What a checkpoint holds tensors of: the learners, and the rollouts that were begun ahead."""
        handles: dict[str, Any] = {name: getattr(self.roles, name) for name in self.learners}
        return {**handles, SCHEDULE: BegunAhead(self.schedule)} if self.schedule.LOOKS_AHEAD else handles

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
            RESOURCES: self.resources(),
        }
        write_json(self.folder / "summary.json", summary)
        if self.mirror is not None:
            self.copy_out(self.mirror)
        return summary

    def resources(self) -> dict[str, Any]:
        """Time and memory of the run."""
        self.spent()
        self.account.measure(self.roles, self.unmeasured)
        return self.account.summary(self.seconds())

    def unmeasured(self, role: str, error: TutelageError) -> None:
        """A rank that does not answer is told of."""
        said = f"what {role} took since the last checkpoint is not known: {error}"
        self.log.event(self.done, "measurement", said)
        self.display.event("measurement", said)
