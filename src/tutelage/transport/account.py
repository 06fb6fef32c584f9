"""The sums of a run: seconds, calls, tokens and peaks of every method of every role, over steps, ranks and resumes.

Seconds are those that the transport tells, of the slowest rank of each call.  Calls, tokens and peaks come from the
meters of the ranks: they are asked at every checkpoint, whose state holds the sums, and at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tutelage.errors import TutelageError
from tutelage.transport.metering import CONTROLLER, TAKE, Measured
from tutelage.transport.roleset import RoleSet

Spent = dict[tuple[str, str], float]


@dataclass
class Line:
    """One method of one role.  where: the process of the largest peak."""

    role: str
    call: str
    calls: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    peak_bytes: int = 0
    where: str = ""


@dataclass
class Account:
    """held: what each role holds, on the rank that holds most.  processes: `ProcessUse` by label.

    uncounted: seconds of the run before its calls were counted, as in a checkpoint of an earlier release.
    """

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    uncounted: float = 0.0

    def spend(self, spent: Mapping[tuple[str, str], float]) -> Spent:
        """Add the seconds of calls; those of roles and of the controller's mathematics, without the questions here."""
        own = {key: seconds for key, seconds in spent.items() if key[1] != TAKE}
        for key, seconds in own.items():
            if key[0] != CONTROLLER:
                self._line(*key).seconds += seconds
        return own

    def measure(self, roles: RoleSet, lost: Callable[[str, TutelageError], None] | None = None) -> None:
        """Ask every rank of every role.  An error is raised, or told to `lost` where that is given, role by role."""
        for name in roles.names():
            try:
                self.add(name, getattr(getattr(roles, name), TAKE)().gather())
            except TutelageError as error:
                if lost is None:
                    raise
                lost(name, error)

    def add(self, role: str, ranks: Sequence[Measured]) -> None:
        """What all ranks of a role say."""
        methods = dict.fromkeys(method for told in ranks for method in told.phases)
        for method in methods:
            found = [(told.phases[method], told.label) for told in ranks if method in told.phases]
            line = self._line(role, method)
            line.calls += max(phase.calls for phase, _ in found)
            line.tokens += sum(phase.tokens for phase, _ in found)
            phase, label = max(found, key=lambda one: one[0].peak)
            if phase.peak > line.peak_bytes:
                line.peak_bytes, line.where = phase.peak, label
        if ranks:
            most = max((told.held for told in ranks), key=lambda h: h.weights + h.gradients + h.moments + h.shared)
            self.held[role] = {**asdict(most), "owners": list(most.owners)}
        for told in ranks:
            before = self.processes.get(told.label)
            if before is None or told.process.peak >= before["peak"]:
                self.processes[told.label] = asdict(told.process)

    def _line(self, role: str, call: str) -> Line:
        return self.lines.setdefault((role, call), Line(role, call))

    def summary(self, seconds: float) -> dict[str, Any]:
        """What summary.json holds; seconds: of the run.

        Shares are of the run.  `other_seconds` is the rest: with `uncounted_seconds` all add up to the run.  None where
        calls overlapped for so long that nothing is left over.
        """
        lines = sorted(self.lines.values(), key=lambda line: -line.seconds)
        rest = seconds - self.uncounted - sum(line.seconds for line in lines)
        share = [{"share": line.seconds / seconds if seconds > 0 else 0.0} for line in lines]
        return {
            "seconds": seconds,
            "other_seconds": rest if rest >= 0 else None,
            "uncounted_seconds": self.uncounted,
            "calls": [
                {**asdict(line), "tokens": round(line.tokens), **s} for line, s in zip(lines, share, strict=True)
            ],
            "held": self.held,
            "processes": self.processes,
        }

    def state(self) -> dict[str, Any]:
        """Of a checkpoint: plain values."""
        return {
            "lines": [asdict(line) for line in self.lines.values()],
            "held": self.held,
            "processes": self.processes,
            "uncounted": self.uncounted,
        }

    def load_state(self, saved: Mapping[str, Any], seconds: float = 0.0) -> None:
        """The sums of a checkpoint.  One without sums says nothing of the `seconds` that the run had taken."""
        self.uncounted = saved.get("uncounted", 0.0) if saved else seconds
        self.lines = {(one["role"], one["call"]): Line(**one) for one in saved.get("lines", [])}
        self.held = dict(saved.get("held", {}))
        self.processes = dict(saved.get("processes", {}))
