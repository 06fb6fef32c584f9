"""How often each method of a role was called in a process, on how many tokens, and the most memory it took.

Every process of a run has one `Meter`.  It measures nothing until it is asked for the first time: whoever measures
this process by other means keeps the marks until then.  A call costs about 0.1 ms.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from tutelage.engines.held import Held, held_by_roles
from tutelage.transport.residency import ProcessMemory, present_size, process_memory
from tutelage.types import Sequences

TAKE = "take_measured"
"""What every handle of a role answers, besides the role's own methods: a list with each rank's `Measured`."""
CONTROLLER = "controller"
CUDA = "cuda"
BUILDING = "before the first call"
BETWEEN = "between calls"


@dataclass(frozen=True)
class Phase:
    """The calls of one method since the last question.

    calls   of this rank.
    tokens  of the rows that this rank worked on, prompts included; rows that peers share are counted in parts.
    peak    bytes: the largest size of the memory that `ProcessUse.kind` names, within a call.
    """

    calls: int = 0
    tokens: float = 0.0
    peak: int = 0

    def and_then(self, calls: int, tokens: float, peak: int) -> Phase:
        return Phase(self.calls + calls, self.tokens + tokens, max(self.peak, peak))


@dataclass(frozen=True)
class ProcessUse:
    """Bytes of one process.

    kind     of the peaks of calls: cuda (torch's allocator), or a kind of `transport.residency`.
    before   resident when the process was about to build its roles: what imports and data take.
    peak     resident, the largest from then on.     during   what ran when it was seen.
    between  as the peaks of calls, of the time when no call ran.
    """

    kind: str
    before: int
    peak: int
    during: str
    between: int


@dataclass(frozen=True)
class Measured:
    """What a process says of one of its roles; label: of the process, such as "main 1"."""

    label: str
    phases: Mapping[str, Phase]
    held: Held
    process: ProcessUse


class CudaMark:
    """The allocator's own mark, of one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def take(self) -> int:
        """Bytes: the most that was given out since the last question; 0 before CUDA is used."""
        if not torch.cuda.is_initialized():
            return 0
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(stats["allocated_bytes"]["all"]["peak"])


@dataclass
class Meter:
    """label: of this process; device: where its roles work; before: bytes resident when this was made, before roles.

    most, during: the largest resident size that was seen, and what ran then.
    """

    label: str = CONTROLLER
    device: str = "cpu"
    process: ProcessMemory = field(default_factory=process_memory)
    before: int = field(default_factory=present_size)
    phases: dict[str, dict[str, Phase]] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    between: int = 0
    most: int = 0
    during: str = BUILDING
    asked: bool = False

    def __post_init__(self) -> None:
        self.lock = threading.RLock()  # calls of several threads may overlap
        self.cuda = CudaMark(self.device) if self.device.startswith("cuda") else None

    def phase(self, role: str, method: str, share: float = 1.0) -> Running:
        """A context for one call; share: of its tokens that are counted here."""
        return Running(self, role, method, share)

    def mark(self) -> None:
        """The peak since the last mark belongs to every call that runs.  Under the lock."""
        resident = self.process.take()
        peak = resident if self.cuda is None else self.cuda.take()
        if resident > self.most:
            self.most = resident
            self.during = self.running[-1].name if self.running else BETWEEN if self.asked else BUILDING
        for running in self.running:
            running.peak = max(running.peak, peak)
        if not self.running:
            self.between = max(self.between, peak)

    def take(self, role: str, roles: Mapping[str, object]) -> Measured:
        """Of a role, since the last question; roles: all of this process."""
        with self.lock:
            self.mark()
            if not self.asked:  # what came before the first question is not of the run
                self.asked, self.between = True, 0
            return Measured(self.label, self.phases.pop(role, {}), held_by_roles(roles)[role], self.use())

    def use(self) -> ProcessUse:
        kind = self.process.mark.kind if self.cuda is None else CUDA
        return ProcessUse(kind, self.before, self.most, self.during, self.between)


class Running:
    """One call.  `saw` tells it what it works on."""

    __slots__ = ("_meter", "_method", "_role", "_share", "name", "peak", "tokens")

    def __init__(self, meter: Meter, role: str, method: str, share: float) -> None:
        self._meter, self._role, self._method, self._share = meter, role, method, share
        self.name = f"{role}.{method}"
        self.peak = 0
        self.tokens = 0.0

    def saw(self, values: Iterable[Any]) -> None:
        """The tokens of the first of these that has rows of tokens."""
        if self._meter.asked:
            self.tokens = self._share * next((count for value in values if (count := tokens_of(value))), 0)

    def __enter__(self) -> Running:
        with self._meter.lock:
            if self._meter.asked:
                self._meter.mark()
                self._meter.running.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        meter = self._meter
        with meter.lock:
            if self not in meter.running:
                return
            meter.mark()
            meter.running.remove(self)
            of_role = meter.phases.setdefault(self._role, {})
            of_role[self._method] = of_role.get(self._method, Phase()).and_then(1, self.tokens, self.peak)


def tokens_of(value: Any) -> int:
    """Tokens of a batch or of sequences, prompts included; 0 for anything else, and for a rank's filler."""
    if isinstance(value, Sequences):
        return int(value.tokens.flat.shape[0])
    if not hasattr(value, "item_tokens") or getattr(value, "filler", False):
        return 0
    return int(value.item_tokens().sum())
