"""Placements of real tensors: which slice of a DTensor each rank of its mesh holds.

A DTensor's placements are read from left to right.  `fully_shard` over a tensor-parallel module gives
(_StridedShard(0, split_factor=tensor), Shard(0)): tensor parallel cuts first and FSDP cuts its slice, although FSDP's
mesh axis stands on the left.  Read as two plain shards, ranks would hold each other's slices.  Where sizes do not
divide, reading it strictly from left to right can still give rows that `fully_shard` did not put there (7 rows, 3
shards x 2 tensor); here it is read as `fully_shard` cuts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from tutelage.errors import ShapeError
from tutelage.transport.weights.boxes import Block, Blocks, Holding, Interval, Placement, Weight, local_shape
from tutelage.transport.weights.placements import chunk


def boxes_of(tensor: DTensor) -> dict[int, Blocks]:
    """What each rank of the mesh holds of a DTensor, by global rank; without communication.

    Raises ShapeError for a placement that is not a slice (a partial sum), and where this rank's local tensor has
    another shape than its blocks.
    """
    ranks = tensor.device_mesh.mesh
    found: dict[int, Blocks] = {}
    for coordinate in itertools.product(*(range(size) for size in ranks.shape)):
        found[int(ranks[coordinate])] = blocks_at(tensor.shape, tensor.placements, ranks.shape, coordinate)
    me = dist.get_rank()
    if me in found:
        expected, local = local_shape(found[me], weight_of(tensor)), tuple(tensor.to_local().shape)
        if expected != local and (found[me] or tensor.to_local().numel()):
            raise ShapeError(
                f"rank {me} holds {local} of a DTensor {tuple(tensor.shape)} with {tensor.placements} on mesh "
                f"{tuple(ranks.shape)}, not {expected}",
                fix="choose sizes that divide the weights, or build the DTensor with distribute_tensor",
            )
    return found


def blocks_at(
    shape: Sequence[int], placements: Sequence[TorchPlacement], mesh: Sequence[int], coordinate: Sequence[int]
) -> Blocks:
    """The blocks of one mesh coordinate, in local order.  Raises ShapeError for a partial sum."""
    held: list[list[Interval]] = [[(0, size)] for size in shape]
    for dim, mesh_axis, factor in _cuts(placements, mesh):
        held[dim] = _strided(held[dim], factor, mesh[mesh_axis], coordinate[mesh_axis])
    located = [_located(intervals) for intervals in held]
    return tuple(
        Block(tuple(interval for interval, _ in combined), tuple(at for _, at in combined))
        for combined in itertools.product(*located)
    )


def _cuts(placements: Sequence[TorchPlacement], mesh: Sequence[int]) -> list[tuple[int, int, int]]:
    """(dimension, mesh axis, split factor) of every shard, in the order in which they cut; plain ones have factor 1.

    A strided shard whose factor is the product of all shards of its dimension on its right cuts after them: so
    `fully_shard` writes it.  It is then a plain cut of what they left.
    """
    order: list[tuple[int, int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        # _StridedShard is private and no subclass of Shard in every version; its split_factor tells them apart.
        dim, factor = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
        if dim is None or not (isinstance(placement, Shard) or hasattr(placement, "split_factor")):
            raise ShapeError(f"{placement} is not a slice of a weight", fix="reduce it, then move it")
        right = math.prod(mesh[other] for other_dim, other, _ in order if other_dim == dim)
        if factor > 1 and factor == right:
            order.append((dim, axis, 1))
        else:
            order.insert(0, (dim, axis, factor))
    return order


def _strided(intervals: list[Interval], factor: int, count: int, index: int) -> list[Interval]:
    """Chunk `index` of `count` of each of `factor` chunks of the concatenated intervals, joined; Shard has factor 1."""
    size = sum(stop - start for start, stop in intervals)
    found: list[Interval] = []
    for virtual in range(factor):
        start, stop = chunk(chunk((0, size), factor, virtual), count, index)
        offset = 0
        for low, high in intervals:
            first, last = max(start, offset), min(stop, offset + high - low)
            if first < last:
                piece = (low + first - offset, low + last - offset)
                if found and found[-1][1] == piece[0]:
                    piece = (found.pop()[0], piece[1])
                found.append(piece)
            offset += high - low
    return found


def _located(intervals: list[Interval]) -> list[tuple[Interval, int]]:
    """Each interval with its offset in the local tensor."""
    offsets = itertools.accumulate((stop - start for start, stop in intervals), initial=0)
    return list(zip(intervals, offsets, strict=False))


def weight_of(tensor: Tensor) -> Weight:
    """The whole shape (of a DTensor, the global one) and the dtype of a tensor."""
    return Weight(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def described(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Weight], Holding, dict[str, Tensor]]:
    """(weights, what this rank holds, local tensors) of named parameters; a plain tensor is whole.

    Local tensors are detached and share memory with the parameters.
    """
    weights = {name: weight_of(tensor) for name, tensor in tensors.items()}
    rank = dist.get_rank() if dist.is_initialized() else 0
    holding = {
        name: boxes_of(tensor).get(rank, ()) if isinstance(tensor, DTensor) else blocks_at(tensor.shape, (), (), ())
        for name, tensor in tensors.items()
    }
    return weights, holding, {name: local_of(tensor.detach()) for name, tensor in tensors.items()}


def gathered(
    weights: Mapping[str, Weight], holding: Holding, group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Weight], Placement]:
    """(all weights, what each rank of the group holds), collectively: where ranks know their own part alone.

    As with pipeline stages, or with source and target in two meshes.  Ranks are those of the group.  The weights come
    in one order on all ranks.  Raises ShapeError, on all ranks, where two ranks name a weight of different shape.
    """
    found: list[tuple[dict[str, Weight], Holding]] = [({}, {})] * dist.get_world_size(group)
    dist.all_gather_object(found, (dict(weights), dict(holding)), group=group)
    known: dict[str, Weight] = {}
    for rank, (theirs, _) in enumerate(found):
        for name, weight in theirs.items():
            if known.setdefault(name, weight) != weight:
                raise ShapeError(f"{name} is {weight} on rank {rank}, {known[name]} on one before", fix="use one model")
    return known, {rank: theirs for rank, (_, theirs) in enumerate(found) if theirs}


def torch_dtype(weight: Weight) -> torch.dtype:
    return getattr(torch, weight.dtype)
