"""Attention in bfloat16 on a CPU: its gradients are those of float64, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutelage.models import half_attention as half


def inputs(h: int, g: int, queries: int, keys: int, size: int = 16, values: int = 16) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(h * keys + queries)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).bfloat16()

    wide = [normal(1, h, queries, size) * 2, normal(1, g, keys, size), normal(1, g, keys, values)]
    return *(x.requires_grad_() for x in wide), normal(1, h, queries, values)


def exact(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, mask: Tensor | None, scale: float) -> list[Tensor]:
    """By autograd in float64, one query and head at a time: the output, then the gradients."""
    q, k, v = (x.detach().double().requires_grad_() for x in (query, key, value))
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    rows = []
    for head in range(heads):
        for at in range(q.shape[2]):
            seen = slice(None) if mask is None else mask[at]
            p = torch.softmax(k[0, head // shared][seen] @ q[0, head, at] * scale, dim=0)
            rows.append(p @ v[0, head // shared][seen])
    out = torch.stack(rows).view(1, heads, q.shape[2], -1)
    out.backward(grad.double())
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def ours(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, mask: Tensor | None, causal: bool) -> list[Tensor]:
    out = half.half_attention(query, key, value, mask, causal, 0.3)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]


def lower(queries: int, keys: int) -> Tensor:
    return torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries


CASES = {
    "causal": ((6, 2, 37, 37), None, True),
    "after a prompt": ((6, 3, 21, 50), lower(21, 50), True),
    "whole": ((4, 4, 9, 23), None, False),
    "window": ((4, 1, 40, 40), lower(40, 40) & ~lower(40, 40).tril(-8), True),
    "one query": ((2, 2, 1, 1), None, True),
    "values of another size": ((4, 2, 33, 33, 16, 24), None, True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("score_bytes", [1, half.SCORE_BYTES])
def test_gradients_are_exact_ones_rounded_once(name: str, score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "SCORE_BYTES", score_bytes)  # 1: runs of the fewest queries
    monkeypatch.setattr(half, "FEWEST_QUERIES", 16)
    shape, mask, causal = CASES[name]
    given = inputs(*shape)
    seen = lower(shape[2], shape[3]) if mask is None and causal else mask
    wanted = exact(*given, seen, 0.3)
    found = ours(*given, mask, causal)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=2**-6, atol=2**-6)
    for ours_x, exact_x in zip(found[1:], wanted[1:], strict=True):
        assert ours_x.dtype == torch.bfloat16
        torch.testing.assert_close(ours_x.double(), exact_x, rtol=2**-8, atol=1e-5)


def test_runs_hold_all_queries_in_multiples_of_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "SCORE_BYTES", 1000)
    for count in (1, 16, 128, 129, 1000):
        run = half.queries_of_a_run(count, 4)
        assert run % half.ALIGNED == 0
        assert run <= max(half.ALIGNED, 250 + half.ALIGNED)


def test_it_is_for_half_precision_on_a_cpu_that_learns() -> None:
    query, key, value, _ = inputs(2, 2, 4, 4)
    assert half.fits(query, key, value)
    assert not half.fits(query.detach(), key.detach(), value.detach())
    assert not half.fits(query.float(), key.float(), value.float())
    with torch.no_grad():
        assert not half.fits(query, key, value)
