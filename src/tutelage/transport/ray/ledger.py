"""The calls that are under way, watched together: who has answered, who failed, who is gone, and what took how long.

Every wait of the driver goes through `Ledger.wait`, in short slices, so that an error in any pool ends it.  Of several
errors of one call the first real one counts: what a rank sees when its peer of a collective is gone (an echo) counts
only where nothing better arrives within `GRACE`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from tutelage.errors import ClusterError
from tutelage.transport.ray.pool import Pool
from tutelage.transport.ray.wire import Report

SLICE = 0.2
GRACE = 30.0


@dataclass(frozen=True)
class Seen:
    """One rank's error; `at` in seconds of the epoch."""

    error: BaseException
    echo: bool
    at: float


@dataclass(eq=False)
class Call:
    """One call on all ranks of a pool.

    reports   a reference per rank.      upstream  calls whose results it reads.
    since     when it came first in its pool with its arguments there: its deadline counts from then.
    """

    id: int
    name: str
    pool: Pool
    reports: list[Any]
    upstream: list[Call]
    key: tuple[str, str] | None = None
    told: dict[int, Report] = field(default_factory=dict)
    errors: dict[int, Seen] = field(default_factory=dict)
    echoed: float | None = None
    since: float | None = None
    settled: bool = False
    failure: BaseException | None = None
    announced: bool = False

    def missing(self) -> list[int]:
        return [r for r in range(len(self.reports)) if r not in self.told and r not in self.errors]


class Ledger:
    """seconds: per (role, method), of the slowest rank.  busy: per pool, the same with fetching the arguments.

    listen      called in every slice of a wait.
    last_words  (rank's log label) -> its last lines.
    """

    def __init__(self, call_timeout: float, listen: Callable[[], None], last_words: Callable[[str], list[str]]) -> None:
        self.call_timeout = call_timeout
        self.listen = listen
        self.last_words = last_words
        self.open: list[Call] = []
        self.seconds: dict[tuple[str, str], float] = {}
        self.busy: dict[str, float] = {}

    def add(self, call: Call) -> None:
        self.open.append(call)

    def wait(self, wanted: Sequence[Call]) -> None:
        """Until these calls are done.  Raises the first new error of any call, and the error of a wanted one."""
        while True:
            self.raise_new()
            if all(call.settled for call in wanted):
                for call in wanted:
                    if call.failure is not None:
                        raise call.failure
                return
            self.poll(SLICE)
            self.listen()

    def raise_new(self) -> None:
        for call in [c for c in self.open if c.settled]:
            self.open.remove(call)
            if call.failure is not None and not call.announced:
                call.announced = True
                call.pool.told |= isinstance(call.failure, ClusterError) and call.failure.pool == call.pool.name
                raise call.failure

    def poll(self, seconds: float) -> None:
        """Take what is there, after waiting for at most `seconds` for anything."""
        waiting = {
            call.reports[rank]: (call, rank) for call in self.open if not call.settled for rank in call.missing()
        }
        if waiting:
            refs = list(waiting)
            if ray.wait(refs, num_returns=1, timeout=seconds)[0]:
                for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                    self._take(*waiting[ref], ref)
        elif any(not call.settled for call in self.open):
            time.sleep(seconds)
        for call in self.open:
            if not call.settled:
                self._settle(call)
        self._deadlines()

    def _take(self, call: Call, rank: int, ref: Any) -> None:
        where = f"in {call.name}, {call.pool.where(rank)}"
        try:
            report: Report = ray.get(ref)
        except RayError as error:
            if call.upstream and self._foreign(call, rank, error):
                call.told[rank] = Report(skipped=True)
                return
            cause = error.cause if isinstance(error, RayTaskError) and not isinstance(error, RayActorError) else None
            seen = cause if isinstance(cause, Exception) else self._gone(call, rank, error)
            seen.add_note(where)
            call.errors[rank] = Seen(seen, False, time.time())
            return
        if report.failure is None:
            call.told[rank] = report
            return
        seen_error = report.failure.restored()
        seen_error.add_note(where)
        call.errors[rank] = Seen(seen_error, report.failure.echo, report.failure.at)

    def _foreign(self, call: Call, rank: int, error: RayError) -> bool:
        """Whether an error is that of an argument, not of the rank that was called."""
        if any(up.failure is not None or up.errors for up in call.upstream):
            return True
        actor = getattr(error, "actor_id", None)
        return actor is not None and actor != call.pool.workers[rank]._actor_id.hex()

    def _gone(self, call: Call, rank: int, error: RayError) -> ClusterError:
        """The error of a rank whose process or node is lost, with its last words."""
        words = self.last_words(call.pool.label(rank))
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = next(
            (line for line in reversed(lines) if "dead" in line or "died" in line or "exit" in line), lines[-1]
        )
        tail = "".join(f"\n    {line}" for line in words)
        lost = ClusterError(
            f"{call.pool.where(rank)} was lost while it ran {call.name}: {cause[:400]}"
            + (f"\n  its last lines:{tail}" if words else ""),
            fix="`tutelage resume` the run, with other cluster settings where less is left of the cluster; "
            "cluster.restarts has the group started again at once",
        )
        lost.pool = call.pool.name
        call.pool.lost = lost
        return lost

    def _settle(self, call: Call) -> None:
        now = time.monotonic()
        if any(report.skipped for report in call.told.values()):
            failed = [up.failure for up in call.upstream if up.failure is not None]
            if failed or all(up.settled for up in call.upstream):
                lost = ClusterError(f"{call.name} could not read its arguments", fix="see the earlier errors")
                self._done(call, failed[0] if failed else lost)
                call.announced = bool(failed)  # it was told by the call that failed
            return
        real = [seen for seen in call.errors.values() if not seen.echo]
        if real:
            self._done(call, min(real, key=lambda seen: seen.at).error)
        elif call.errors:
            call.echoed = call.echoed or now
            if not call.missing() or now - call.echoed > GRACE:
                self._done(call, min(call.errors.values(), key=lambda seen: seen.at).error)
        elif not call.missing():
            self._done(call, None)

    def _done(self, call: Call, failure: BaseException | None) -> None:
        call.settled, call.failure, call.upstream = True, failure, []
        if call.key is not None and call.told:
            slowest = max(report.seconds for report in call.told.values())
            busy = max(report.busy for report in call.told.values())
            self.seconds[call.key] = self.seconds.get(call.key, 0.0) + slowest
            self.busy[call.pool.name] = self.busy.get(call.pool.name, 0.0) + busy

    def _deadlines(self) -> None:
        """Only the first open call of a pool can be running; the clock of the others stands."""
        now, seen = time.monotonic(), set[str]()
        for call in self.open:
            if call.settled or call.pool.name in seen:
                continue
            seen.add(call.pool.name)
            if call.since is None and all(up.settled for up in call.upstream):
                call.since = now
            if call.since is not None and now - call.since > self.call_timeout:
                late = call.missing()
                error = ClusterError(
                    f"{call.name} has not ended within {self.call_timeout:g} s (cluster.call_timeout); "
                    f"no answer from {', '.join(call.pool.where(rank) for rank in late)}",
                    fix="raise cluster.call_timeout, or see the log of these ranks for what they wait for",
                )
                error.pool = call.pool.name
                call.pool.lost = error
                self._done(call, error)

    def forget(self, pool: Pool, failure: BaseException) -> None:
        """Close the calls of a pool that is started again; several may have failed of one loss, which is told once."""
        for call in self.open:
            if call.pool is pool:
                if not call.settled:
                    self._done(call, failure)
                call.announced = True

    def take_seconds(self) -> dict[tuple[str, str], float]:
        taken, self.seconds = self.seconds, {}
        return taken

    def take_busy(self) -> dict[str, float]:
        taken, self.busy = self.busy, {}
        return taken
