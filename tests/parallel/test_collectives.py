"""Collectives and their gradients, against sums written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from spmd_kit import run_ranks
from torch import Tensor

from tutelage.models.parallel.collectives import copied, exchanged, gathered, reduced, summed

WORLD = 3


def inputs(rank: int) -> Tensor:
    """(3, 2) of rank r: 100 r + 10 i + j."""
    return torch.tensor([[100.0 * rank + 10 * i + j for j in range(2)] for i in range(WORLD)], dtype=torch.float64)


def weights(rank: int, shape: tuple[int, ...]) -> Tensor:
    """Of rank r's objective: sum of weight times output."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def run(rank: int, world: int, name: str) -> tuple[Tensor, Tensor]:
    every: dict[str, Any] = {f.__name__: f for f in (summed, gathered, exchanged, reduced, copied)}
    x = inputs(rank).requires_grad_()
    y = every[name](x, dist.group.WORLD)
    (y * weights(rank, y.shape)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def expected(name: str, rank: int) -> tuple[Tensor, Tensor]:
    everyone = range(WORLD)
    if name == "summed":  # every rank's output has this rank's x in it
        return sum(inputs(r) for r in everyone), sum(weights(r, (3, 2)) for r in everyone)
    if name == "gathered":
        return torch.stack([inputs(r) for r in everyone]), sum(weights(r, (3, 3, 2))[rank] for r in everyone)
    if name == "exchanged":  # part p of this x is part `rank` of rank p's output
        return (
            torch.stack([inputs(r)[rank] for r in everyone]),
            torch.stack([weights(r, (3, 2))[rank] for r in everyone]),
        )
    if name == "reduced":
        return sum(inputs(r) for r in everyone), weights(rank, (3, 2))
    return inputs(rank), sum(weights(r, (3, 2)) for r in everyone)


@pytest.mark.parametrize("name", ["summed", "gathered", "exchanged", "reduced", "copied"])
def test_values_and_gradients_are_the_sums_written_out(name):
    for rank, (value, grad) in enumerate(run_ranks(run, WORLD, name)):
        want_value, want_grad = expected(name, rank)
        torch.testing.assert_close(value, want_value, atol=1e-12, rtol=0)
        torch.testing.assert_close(grad, want_grad, atol=1e-12, rtol=0)
