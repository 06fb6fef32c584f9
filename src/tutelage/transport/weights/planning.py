"""Which rank sends which slice to which rank: every needed slice once, from the nearest holder.  Torch-free.

ReaL's parameter reallocation (Mei et al. 2024, arXiv:2406.14088) and HybridFlow's resharding (Sheng et al. 2024,
arXiv:2409.19256) are the same plan on other placements.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tutelage.errors import ShapeError, closest
from tutelage.transport.weights.boxes import (
    Box,
    Interval,
    Placement,
    Weight,
    check_placement,
    intersection,
    volume,
)
from tutelage.transport.weights.rounds import Round, Transfer, rounds


@dataclass(frozen=True)
class Plan:
    """transfers  what goes over the wire; src and dst differ.
    kept       what a rank already has: src and dst are the same, nothing is sent.
    """

    weights: Mapping[str, Weight]
    source: Placement
    target: Placement
    transfers: tuple[Transfer, ...]
    kept: tuple[Transfer, ...]
    _schedules: dict[tuple[int, int], list[Round]] = field(default_factory=dict, repr=False, compare=False)

    def rounds(self, bucket_bytes: int, rank: int) -> list[Round]:
        """What one rank sends and receives in each round (`rounds.rounds`); as many rounds on every rank.

        Made once for a plan.  Raises ConfigError for a bucket that cannot hold one element each way.
        """
        key = bucket_bytes, rank
        if key not in self._schedules:
            every = rounds(self.transfers, self.weights, bucket_bytes)
            self._schedules[key] = [step.of(rank) for step in every]
        return self._schedules[key]

    @property
    def wire_bytes(self) -> int:
        return sum(transfer.nbytes for transfer in self.transfers)

    @cached_property
    def sent(self) -> Mapping[int, int]:
        """Bytes that each rank sends; ranks that send nothing are 0."""
        return _totals((transfer.src, transfer.nbytes) for transfer in self.transfers)

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Bytes that each rank receives; ranks that receive nothing are 0."""
        return _totals((transfer.dst, transfer.nbytes) for transfer in self.transfers)

    @cached_property
    def fingerprint(self) -> int:
        """A positive 63-bit number; equal on all ranks that made the same plan."""
        text = repr((sorted(self.weights.items()), self.transfers, self.kept))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    @property
    def ranks(self) -> int:
        """One more than the highest rank that holds or receives anything."""
        return 1 + max((rank for placement in (self.source, self.target) for rank in placement), default=-1)


@dataclass(frozen=True)
class _Need:
    dst: int
    name: str
    box: Box
    nbytes: int
    holders: tuple[int, ...]


def plan(
    source: Placement,
    target: Placement,
    weights: Mapping[str, Weight],
    nodes: Mapping[int, Hashable] | None = None,
) -> Plan:
    """The transfers that turn `source` into `target`.

    A slice that the target rank holds is not sent.  Any other comes from one holder: on the same node where there is
    one, else anywhere; of those, from the one that sends fewest bytes so far, the largest slices first.  So replicas
    share the work.  The plan depends on its arguments alone: every rank makes the same one.

    nodes   the node of each rank; None: all on one.  A rank that is not named is a node of its own.
    Target weights need not be all of `weights`; what no target names stays where it is.

    Raises ShapeError for a weight or a slice that no source rank holds, and for slices outside their weight.
    """
    check_placement(source, weights, "source")
    check_placement(target, weights, "target")
    needs: list[_Need] = []
    kept: list[Transfer] = []
    for name, weight in weights.items():
        holders = _holders(source, name)
        cells: dict[Box, list[tuple[Box, tuple[int, ...]]]] = {}
        for dst in sorted(target):
            for block in target[dst].get(name, ()):
                if block.box not in cells:
                    cells[block.box] = _cells(block.box, holders, name, source, dst)
                for box, ranks in cells[block.box]:
                    nbytes = volume(box) * weight.itemsize
                    if dst in ranks:
                        kept.append(Transfer(dst, dst, name, box, nbytes))
                    else:
                        needs.append(_Need(dst, name, box, nbytes, ranks))
    return Plan(weights, source, target, _assigned(needs, weights, nodes), tuple(kept))


def _holders(source: Placement, name: str) -> dict[Box, tuple[int, ...]]:
    """The distinct boxes of a weight, and the ranks that hold each."""
    found: dict[Box, tuple[int, ...]] = {}
    for rank in sorted(source):
        for block in source[rank].get(name, ()):
            found[block.box] = (*found.get(block.box, ()), rank)
    return found


def _cells(
    box: Box, holders: Mapping[Box, tuple[int, ...]], name: str, source: Placement, dst: int
) -> list[tuple[Box, tuple[int, ...]]]:
    """Disjoint cells that fill a box, each with all ranks that hold it, whole and inside one block."""
    parts = [(common, ranks) for held, ranks in holders.items() if (common := intersection(box, held)) is not None]
    edges = [sorted({*box[dim], *(edge for part, _ in parts for edge in part[dim])}) for dim in range(len(box))]
    found: defaultdict[Box, tuple[int, ...]] = defaultdict(tuple)
    for part, ranks in parts:
        for cell in itertools.product(*(_between(edges[dim], part[dim]) for dim in range(len(box)))):
            found[cell] += ranks
    for cell in itertools.product(*(_between(edges[dim], box[dim]) for dim in range(len(box)))):
        if cell not in found:
            raise ShapeError(
                f"rank {dst} needs {name}{_shown(cell)}, which no source rank holds"
                f"{_hint(name, source) if not holders else ''}",
                fix="the source must hold every slice that the target names",
            )
    return sorted(found.items())


def _between(edges: list[int], interval: Interval) -> list[Interval]:
    inner = [edge for edge in edges if interval[0] <= edge <= interval[1]]
    return list(itertools.pairwise(inner))


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _hint(name: str, source: Placement) -> str:
    known = {other for holding in source.values() for other, blocks in holding.items() if blocks}
    return f".{closest(name, known)}"


def _assigned(
    needs: list[_Need], weights: Mapping[str, Weight], nodes: Mapping[int, Hashable] | None
) -> tuple[Transfer, ...]:
    order = {name: index for index, name in enumerate(weights)}
    load: defaultdict[int, int] = defaultdict(int)
    found = []
    for need in sorted(needs, key=lambda need: (-need.nbytes, order[need.name], need.dst, need.box)):
        near = [rank for rank in need.holders if _together(rank, need.dst, nodes)]
        src = min(near or need.holders, key=lambda rank: (load[rank], rank))
        load[src] += need.nbytes
        found.append(Transfer(src, need.dst, need.name, need.box, need.nbytes))
    return tuple(sorted(found, key=lambda transfer: (order[transfer.name], transfer.dst, transfer.box)))


def _together(one: int, other: int, nodes: Mapping[int, Hashable] | None) -> bool:
    if nodes is None:
        return True
    return one in nodes and other in nodes and nodes[one] == nodes[other]


def _totals(pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    found: defaultdict[int, int] = defaultdict(int)
    for rank, nbytes in pairs:
        found[rank] += nbytes
    return found


def across_nodes(made: Plan, nodes: Mapping[int, Hashable]) -> int:
    """Bytes that leave their node."""
    return sum(t.nbytes for t in made.transfers if not _together(t.src, t.dst, nodes))
