"""How the ranks of a role are arranged, which of them split a batch, and which of them reply.

Torch-free.  Ranks count through the axes from the left: pipeline, replicate, shard, context, sequence, tensor; so
tensor-parallel peers are neighbours, and a pipeline stage is a block of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tutelage.errors import ConfigError

AXES = ("pipeline", "replicate", "shard", "context", "sequence", "tensor")
DATA_AXES = ("replicate", "shard")
WHOLE_WEIGHT_AXES = ("replicate", "shard", "context", "sequence")


class Dispatch(Enum):
    """How a call on a role reaches its ranks, and what comes back (HybridFlow, Sheng et al. 2024, section 4).

    ROWS       row-wise arguments are split over the data axes; ranks that differ only in other axes get the same rows,
               one of them replies; replies are joined in the order of the rows.
    GENERATE   as ROWS, split over every axis but tensor and pipeline: sampling needs no context or sequence peers.
    MINIBATCH  (batch, loss): each data rank gets its `Share`; the reply is the same on every rank.
    ALL        every rank gets the arguments as they are; the first rank replies.
    EACH       arguments are lists with one entry a rank; the reply is the list of all ranks' replies.
    """

    ROWS = "rows"
    GENERATE = "generate"
    MINIBATCH = "minibatch"
    ALL = "all"
    EACH = "each"


def dispatch_of(role: object, method: str) -> Dispatch:
    """What a role declares for a method in `DISPATCH`; ALL where it declares nothing."""
    declared: Mapping[str, Dispatch] = getattr(role, "DISPATCH", {})
    return declared.get(method, Dispatch.ALL)


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes of one role: replicas, FSDP shards, context, sequence (Ulysses), tensor, pipeline stages.

    Raises ConfigError for a size below 1.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ConfigError(f"{axis} is {getattr(self, axis)}", fix="a layout's sizes are 1 or more")

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes)

    @property
    def data(self) -> int:
        """Parts that a mini-batch is split into."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on every axis."""
        found: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}

    def part(self, rank: int, axes: tuple[str, ...] = DATA_AXES) -> int:
        """Which part of a split over `axes` a rank works on."""
        place, part = self.coordinates(rank), 0
        for axis in axes:
            part = part * getattr(self, axis) + place[axis]
        return part

    def parts(self, axes: tuple[str, ...] = DATA_AXES) -> int:
        return math.prod(getattr(self, axis) for axis in axes)

    def replies(self, rank: int, axes: tuple[str, ...] = DATA_AXES) -> bool:
        """Whether a rank replies for its part: the first of its peers, on the last pipeline stage."""
        place = self.coordinates(rank)
        first = all(place[axis] == 0 for axis in AXES if axis not in axes and axis != "pipeline")
        return first and place["pipeline"] == self.pipeline - 1

    def __str__(self) -> str:
        named = [f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return ", ".join(named) or "1 rank"


def no_progress(what: str, done: int, total: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Place:
    """Where one process of a pool stands; its torch process group, where world > 1, is made before any role is built.

    layouts  of the roles in this pool; a role that is not named has one rank.
    device   "cpu", "cuda" or "cuda:N".
    progress called with (what, done, total) by work that takes long.
    address  at which the other processes of the run reach the pool's first one.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    progress: Callable[[str, int, int], None] = no_progress
    address: str = "127.0.0.1"

    def layout(self, role: str) -> Layout:
        return self.layouts.get(role, Layout())


@dataclass(frozen=True)
class Built:
    """What a builder made in one process: roles by name, and notes on what was decided while building."""

    roles: dict[str, object]
    notes: tuple[str, ...] = ()


RoleBuilder = Callable[[tuple[str, ...], Place], Built]
"""(names of the roles of a pool, place) -> the roles.  Picklable where a transport builds roles in other processes."""
