"""Collision probabilities, candidates and likeliest tokens from the output layer, against whole float64 softmaxes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tutelage.errors import ShapeError
from tutelage.math.logprobs import Asked, distribution_outputs, head_outputs

N, V, H, C = 23, 17, 6, 4


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (N, H), weight (V, H), targets (N,), candidates (N, C)."""
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, H, dtype=torch.float64, generator=random).requires_grad_(True)
    weight = torch.randn(V, H, dtype=torch.float64, generator=random).requires_grad_(True)
    targets = torch.randint(0, V, (N,), generator=random)
    candidates = torch.stack([torch.randperm(V, generator=random)[:C] for _ in range(N)])
    return hidden, weight, targets, candidates


def test_hand_values_of_a_half_and_two_quarters() -> None:
    logp = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    asked = Asked(log_collision=True, candidates=torch.tensor([[2, 0]]), top=1)
    found = distribution_outputs(logp, torch.tensor([1]), asked)
    assert float(found["log_collision"]) == pytest.approx(math.log(3 / 8), abs=1e-12)
    assert found["candidate_logp"].tolist() == [pytest.approx([math.log(0.25), math.log(0.5)])]
    assert found["top_ids"].tolist() == [[0]]
    assert float(found["top_logp"]) == pytest.approx(math.log(0.5))


def test_a_certain_token_collides_surely_and_four_equal_ones_with_a_quarter() -> None:
    sure = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf], [-math.log(4)] * 4])
    found = distribution_outputs(sure, torch.tensor([0, 0]), Asked(log_collision=True))["log_collision"]
    torch.testing.assert_close(found, torch.tensor([0.0, -math.log(4)]))


@pytest.mark.parametrize("chunk", [1, 5, N, 1000])
def test_chunked_outputs_at_a_temperature_are_those_of_a_whole_softmax(chunk: int) -> None:
    hidden, weight, targets, candidates = case()
    asked = Asked(entropy=True, log_collision=True, candidates=candidates, top=3)
    found = head_outputs(hidden, targets, lambda h: h @ weight.T, asked, temperature=0.7, chunk_tokens=chunk)
    p = torch.softmax(hidden @ weight.T / 0.7, dim=-1)
    for n in range(N):
        row = p[n].tolist()
        assert math.exp(float(found["log_collision"][n])) == pytest.approx(sum(x * x for x in row), rel=1e-12)
        assert found["candidate_logp"][n].exp().tolist() == pytest.approx([row[int(v)] for v in candidates[n]])
        order = sorted(range(V), key=lambda v, row=row: -row[v])[:3]
        assert found["top_ids"][n].tolist() == order
        assert found["top_logp"][n].exp().tolist() == pytest.approx([row[v] for v in order])
    assert found["top_ids"].dtype == torch.int64


def test_candidates_carry_the_gradient_of_the_whole_softmax_and_the_others_none() -> None:
    hidden, weight, targets, candidates = case()
    asked = Asked(log_collision=True, candidates=candidates, top=2)
    found = head_outputs(hidden, targets, lambda h: h @ weight.T, asked, temperature=0.7, chunk_tokens=5)
    assert not found["log_collision"].requires_grad
    assert not found["top_logp"].requires_grad
    factor = torch.randn(N, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((factor * found["candidate_logp"]).sum(), [hidden, weight])
    whole = torch.log_softmax(hidden @ weight.T / 0.7, dim=-1)
    picked = torch.stack([whole[n, candidates[n]] for n in range(N)])
    for got, expected in zip(ours, torch.autograd.grad((factor * picked).sum(), [hidden, weight]), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_gradcheck_of_candidates() -> None:
    hidden, weight, targets, candidates = case()

    def of(hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
        asked = Asked(candidates=candidates[:4])
        return head_outputs(hidden_NH, targets[:4], lambda h: h @ weight_VH.T, asked, chunk_tokens=3)["candidate_logp"]

    assert torch.autograd.gradcheck(of, (hidden[:4].detach().requires_grad_(True), weight))


def test_likeliest_tokens_below_a_bound_keep_the_probabilities_of_the_whole() -> None:
    logp = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    found = distribution_outputs(logp, torch.tensor([0]), Asked(top=2, below=3))
    assert found["top_ids"].tolist() == [[2, 1]]
    assert found["top_logp"].exp().tolist() == [pytest.approx([0.3, 0.2])]
    with pytest.raises(ShapeError, match="the 4 likeliest of 3 tokens"):
        distribution_outputs(logp, torch.tensor([0]), Asked(top=4, below=3))


def test_candidates_of_another_number_of_rows_are_refused() -> None:
    hidden, weight, targets, candidates = case()
    with pytest.raises(ShapeError, match="do not fit 23 targets"):
        head_outputs(hidden, targets, lambda h: h @ weight.T, Asked(candidates=candidates[:-1]))
