"""Slices of weights, and which rank holds which: the vocabulary of a move.  Torch-free.

A box is a slice of a whole weight: (start, stop) for each dimension.  A scalar's box is ().
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tutelage.errors import ShapeError, closest

Interval = tuple[int, int]
Box = tuple[Interval, ...]

ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element, by the name of its torch dtype."""


@dataclass(frozen=True)
class Weight:
    """A whole weight: its shape and the name of its torch dtype.  A move does not cast: source and target have it.

    Raises ShapeError for a dtype that is not in ITEMSIZES.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZES:
            raise ShapeError(
                f"dtype {self.dtype!r} cannot be moved.{closest(self.dtype, ITEMSIZES)}",
                fix=f"use one of {', '.join(ITEMSIZES)}",
            )

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Block:
    """A box of the whole weight, and where it begins in the local tensor that holds it."""

    box: Box
    at: tuple[int, ...]


Blocks = tuple[Block, ...]
"""What one rank holds of one weight: disjoint blocks that fill its local tensor.  (): nothing."""

Holding = Mapping[str, Blocks]
"""What one rank holds, by the name of the weight."""

Placement = Mapping[int, Holding]
"""What each rank of a group holds.  A rank that is not named holds nothing."""


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def within(inner: Box, outer: Box) -> bool:
    return all(o[0] <= i[0] and i[1] <= o[1] for i, o in zip(inner, outer, strict=True))


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes share; None where it is empty."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def difference(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that fill `box` outside `hole`, which lies in it: at most two for each dimension."""
    rest: list[Box] = []
    core = box
    for dim, (start, stop) in enumerate(hole):
        for low, high in ((core[dim][0], start), (stop, core[dim][1])):
            if low < high:
                rest.append((*core[:dim], (low, high), *core[dim + 1 :]))
        core = (*core[:dim], (start, stop), *core[dim + 1 :])
    return rest


def outside(box: Box, held: Iterable[Box]) -> tuple[list[Box], list[Box]]:
    """(the parts of a box that are in one of `held`, the parts that are in none); all disjoint."""
    inside: list[Box] = []
    missing = [box]
    for other in held:
        left: list[Box] = []
        for part in missing:
            common = intersection(part, other)
            if common is None:
                left.append(part)
            else:
                inside.append(common)
                left.extend(difference(part, common))
        missing = left
    return inside, missing


def one_block(box: Box) -> Blocks:
    """A local tensor that is one box; () for an empty box."""
    return (Block(box, (0,) * len(box)),) if all(start < stop for start, stop in box) else ()


def local_shape(blocks: Blocks, weight: Weight) -> tuple[int, ...]:
    """The shape of the local tensor; its first size is 0 where a rank holds nothing."""
    if not blocks:
        return (0, *weight.shape[1:])
    return tuple(
        max(block.at[dim] + block.box[dim][1] - block.box[dim][0] for block in blocks)
        for dim in range(len(weight.shape))
    )


def check_placement(placement: Placement, weights: Mapping[str, Weight], what: str) -> None:
    """Raises ShapeError for an unknown weight, a block outside it, and blocks that leave holes or overlap."""
    for rank, holding in placement.items():
        for name, blocks in holding.items():
            if name not in weights:
                raise ShapeError(
                    f"rank {rank} of the {what} has {name!r}, which is not a weight of this model."
                    f"{closest(name, weights)}",
                    fix="give the shape of every weight that moves",
                )
            _check_blocks(blocks, weights[name], f"{name} on rank {rank} of the {what}")


def _check_blocks(blocks: Blocks, weight: Weight, where: str) -> None:
    for block in blocks:
        if len(block.box) != len(weight.shape) or not within(block.box, whole(weight.shape)) or volume(block.box) < 1:
            raise ShapeError(
                f"{where}: {block.box} is not a slice of shape {weight.shape}", fix="see placements.placed"
            )
    local = [tuple((a, a + n) for a, n in zip(b.at, extent(b.box), strict=True)) for b in blocks]
    filled = math.prod(local_shape(blocks, weight)) == sum(volume(box) for box in local) if blocks else True
    for boxes in (local, [block.box for block in blocks]) if len(blocks) > 1 else ():
        filled &= all(intersection(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])
    if not filled:
        raise ShapeError(
            f"{where}: {len(blocks)} blocks leave holes in the local tensor or overlap", fix="blocks are disjoint"
        )
