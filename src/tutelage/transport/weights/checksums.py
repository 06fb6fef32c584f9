"""Proof that two layouts hold the same weights, to the bit: sums that no layout, order or rank changes.

The digest of a weight is the sum, modulo 2^64, of a hash of (position in the whole weight, bits of the element) over
all its elements.  A sum has no order, and parts of it may be on any rank; a slice at the wrong place changes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch import distributed as dist

from tutelage.errors import TrainingError
from tutelage.transport.weights.boxes import Blocks, Box, Placement, Weight, extent, intersection, outside
from tutelage.transport.weights.moving import part_of

CHUNK = 1 << 20
"""Elements that are hashed at once: 8 bytes each, several times."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor, blocks: Blocks, shape: Iterable[int], only: Iterable[Box] | None = None) -> int:
    """The part of a weight's digest that a local tensor holds.

    tensor  the local tensor; blocks: what it holds of the weight of `shape`.
    only    sum over these boxes, disjoint and each inside one block; None: all.
    """
    whole = tuple(shape)
    boxes = [block.box for block in blocks] if only is None else list(only)
    total = 0
    for box in boxes:
        total += _box_sum(part_of(tensor, blocks, box), box, whole)
    return _signed(total)


def _box_sum(part: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    if not box:
        return int(_mixed(torch.zeros(1, dtype=torch.int64, device=part.device), part.reshape(1)).sum())
    total, row = 0, max(1, math.prod(extent(box)[1:]))
    step = max(1, CHUNK // row)
    for first in range(0, part.shape[0], step):
        rows = part[first : first + step]
        position = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, (start, size) in enumerate(zip((b[0] for b in box), rows.shape, strict=True)):
            begin = start + (first if dim == 0 else 0)
            along = torch.arange(begin, begin + size, device=part.device) * math.prod(shape[dim + 1 :])
            position = position.unsqueeze(-1) + along
        total += int(_mixed(position, rows).sum())
    return total


def _mixed(position: Tensor, part: Tensor) -> Tensor:
    """Multiply, xor-shift and multiply again (as in splitmix64, Steele et al. 2014); int64 wraps around."""
    bits = part.view(BITS[part.element_size()]).to(torch.int64)
    mixed = position * -7046029254386353131 + bits * -4658895280553007687 + 7809847782465536322
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)


def _signed(total: int) -> int:
    """Modulo 2^64, as a signed 64-bit number."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def checksums(
    local: Mapping[str, Tensor],
    placement: Placement,
    weights: Mapping[str, Weight],
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
) -> dict[str, int]:
    """The digest of every weight that the placement holds whole or in part; collective, the same on all ranks.

    Each element counts once, on the lowest rank that holds it.  Ranks with the same blocks are compared too, so every
    replica is proven.  device: of the collective; the GPU with NCCL.

    Raises TrainingError, on all ranks, where replicas differ.
    """
    names = [name for name in sorted(weights) if any(holding.get(name) for holding in placement.values())]
    rank, mine = dist.get_rank(group), placement.get(dist.get_rank(group), {})
    sums = torch.zeros(2, len(names), dtype=torch.int64)
    for index, name in enumerate(names):
        if blocks := mine.get(name, ()):
            shape = weights[name].shape
            owned = _owned(placement, name, rank)
            sums[0, index] = checksum(local[name], blocks, shape)
            whole = owned == [block.box for block in blocks]
            sums[1, index] = sums[0, index] if whole else checksum(local[name], blocks, shape, owned)
    gathered = [torch.empty_like(sums, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, sums.to(device), group=group)
    held = [part.cpu() for part in gathered]
    for index, name in enumerate(names):
        seen: dict[Blocks, int] = {}
        for other in sorted(placement):
            blocks = placement[other].get(name, ())
            first = seen.setdefault(blocks, other)
            if blocks and held[first][0, index] != held[other][0, index]:
                raise TrainingError(
                    f"ranks {first} and {other} hold the same slice of {name} with different values",
                    fix="find which step let the replicas drift apart; move from one of them only",
                )
    total = torch.stack(held)[:, 1].sum(dim=0)
    return dict(zip(names, total.tolist(), strict=True))


def _owned(placement: Placement, name: str, rank: int) -> list[Box]:
    """The parts of a rank's blocks that no lower rank holds."""
    lower = [block.box for other in sorted(placement) if other < rank for block in placement[other].get(name, ())]
    parts: list[Box] = []
    for block in placement[rank][name]:
        near = [box for box in lower if intersection(box, block.box) is not None]
        parts += outside(block.box, near)[1]
    return parts


def verify(
    source: tuple[Mapping[str, Tensor], Placement],
    target: tuple[Mapping[str, Tensor], Placement],
    weights: Mapping[str, Weight],
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
) -> dict[str, int]:
    """The digests of the target, after they were compared with the source's.  Collective.

    source, target   this rank's local tensors, and the placement of all ranks.
    A target that holds less than a whole weight has another digest: compare whole weights.

    Raises TrainingError, on all ranks, naming the first weights that differ.
    """
    before = checksums(*source, weights, group, device=device)
    after = checksums(*target, weights, group, device=device)
    wrong = [name for name in after if after[name] != before.get(name)]
    if wrong:
        raise TrainingError(
            f"{len(wrong)} of {len(after)} weights differ between source and target, first {wrong[0]}",
            fix="do not use the target; move again, from weights that nothing changes meanwhile",
        )
    return after
