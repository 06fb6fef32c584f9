"""Models as shapes and random numbers, local tensors by plain slicing, and the bytes of a move counted from outside."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist

from tutelage.transport.weights.boxes import Placement, Weight
from tutelage.transport.weights.llama import Sizes
from tutelage.transport.weights.moving import Moved, move
from tutelage.transport.weights.planning import Plan

TINY = Sizes(vocabulary=64, hidden=32, intermediate=48, layers=4, heads=4, kv_heads=4, head_dim=8, head=True)
"""Every size divides by 4, four blocks."""


def full_tensor(name: str, weight: Weight) -> Tensor:
    """Random, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(weight.shape, generator=generator).to(getattr(torch, weight.dtype))


def full_tensors(weights: Mapping[str, Weight]) -> dict[str, Tensor]:
    return {name: full_tensor(name, weight) for name, weight in weights.items()}


def sliced(full: Mapping[str, Tensor], placement: Placement, rank: int) -> dict[str, Tensor]:
    """What a rank holds where each local tensor is one block."""
    found = {}
    for name, blocks in placement.get(rank, {}).items():
        if blocks:
            (block,) = blocks
            found[name] = full[name][tuple(slice(start, stop) for start, stop in block.box)].clone()
    return found


def marks(placement: Placement, weights: Mapping[str, Weight], rank: int, name: str) -> Tensor:
    """(shape of the weight) int: how often a rank holds each element."""
    held = torch.zeros(weights[name].shape, dtype=torch.int64)
    for block in placement.get(rank, {}).get(name, ()):
        held[tuple(slice(start, stop) for start, stop in block.box)] += 1
    return held


def missing_bytes(source: Placement, target: Placement, weights: Mapping[str, Weight], rank: int) -> int:
    """Bytes that a rank needs and does not hold, element by element."""
    return sum(
        int(((marks(target, weights, rank, name) > 0) & (marks(source, weights, rank, name) == 0)).sum())
        * weight.itemsize
        for name, weight in weights.items()
    )


def measured_move(plan: Plan, local: Mapping[str, Tensor], **settings: Any) -> tuple[Moved, int, int]:
    """(moved, bytes given to the collectives for other ranks, bytes taken from them), seen from outside of `move`."""
    sent = received = 0
    real, rank = dist.all_to_all_single, dist.get_rank()

    def counting(output: Tensor, given: Tensor, sizes_in: list[int], sizes_out: list[int], **rest: Any) -> Any:
        nonlocal sent, received
        assert sizes_in[rank] == sizes_out[rank] == 0, "a rank sends to itself"
        sent += given.numel() * given.element_size()
        received += output.numel() * output.element_size()
        return real(output, given, sizes_in, sizes_out, **rest)

    with mock.patch.object(dist, "all_to_all_single", counting):
        moved = move(plan, local, **settings)
    return moved, sent, received
