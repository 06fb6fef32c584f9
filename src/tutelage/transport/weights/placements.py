"""Which slice of each weight a rank of a layout holds.  Torch-free.

Tensor parallel cuts first; FSDP then cuts what is left, as `fully_shard` does over a parallelised module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tutelage.errors import ConfigError
from tutelage.layout import Layout
from tutelage.transport.weights.boxes import Box, Holding, Interval, Placement, Weight, one_block, whole


@dataclass(frozen=True)
class Cut:
    """How the axes of a layout cut one weight.

    tensor  the dimension that tensor parallel splits; None: every tensor rank has all of it.
    shard   the dimension that FSDP splits.
    stages  the pipeline stages that have this weight; None: all.
    """

    tensor: int | None = None
    shard: int = 0
    stages: tuple[int, ...] | None = None


def chunk(interval: Interval, count: int, index: int) -> Interval:
    """Chunk `index` of `count` as torch.chunk cuts: all of ceil(size / count), the last ones shorter or empty."""
    start, stop = interval
    step = -(-(stop - start) // count)
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


def placed(
    weights: Mapping[str, Weight],
    layout: Layout,
    cuts: Mapping[str, Cut],
    *,
    shard_axes: tuple[str, ...] = ("shard",),
    numbers: tuple[int, ...] | None = None,
) -> Placement:
    """What every rank of a layout holds.

    shard_axes  the axes that FSDP shards over, the slowest first.  On all other axes but tensor and pipeline a rank
                holds what its peers hold.
    numbers     numbers[i] is the rank of the layout that rank i of the group stands for (`grouping.strided`);
                None: rank i.

    Raises ConfigError for a stage that the layout does not have.
    """
    for name in weights:
        wrong = [stage for stage in cuts[name].stages or () if not 0 <= stage < layout.pipeline]
        if wrong:
            raise ConfigError(
                f"{name} is on stage {wrong[0]} of {layout.pipeline} pipeline stages", fix="cut for the same layout"
            )
    order = numbers if numbers is not None else tuple(range(layout.size))
    return {rank: _holding(weights, layout, cuts, shard_axes, number) for rank, number in enumerate(order)}


def _holding(
    weights: Mapping[str, Weight], layout: Layout, cuts: Mapping[str, Cut], shard_axes: tuple[str, ...], rank: int
) -> Holding:
    place = layout.coordinates(rank)
    shards, shard = layout.parts(shard_axes), layout.part(rank, shard_axes)
    found = {}
    for name, weight in weights.items():
        cut = cuts[name]
        if cut.stages is not None and place["pipeline"] not in cut.stages:
            continue
        box = whole(weight.shape)
        if cut.tensor is not None:
            box = _narrowed(box, cut.tensor, layout.tensor, place["tensor"])
        if box and shards > 1:
            box = _narrowed(box, cut.shard, shards, shard)
        found[name] = one_block(box)
    return found


def _narrowed(box: Box, dim: int, count: int, index: int) -> Box:
    return (*box[:dim], chunk(box[dim], count, index), *box[dim + 1 :])


def on_ranks(placement: Placement, ranks: Mapping[int, int]) -> Placement:
    """The same placement on other ranks: ranks[r] holds what r held, as when a role moves to another pool."""
    return {ranks[rank]: holding for rank, holding in placement.items()}


def whole_on(weights: Mapping[str, Weight], ranks: tuple[int, ...]) -> Placement:
    """Every weight whole on each of `ranks`."""
    return {rank: {name: one_block(whole(weight.shape)) for name, weight in weights.items()} for rank in ranks}
