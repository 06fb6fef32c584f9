"""Bradley-Terry loss and pair accuracy, by hand and against the definition."""

from __future__ import annotations

import math

import pytest
import torch

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.reward_loss import bradley_terry_loss, pair_accuracy


def test_by_hand() -> None:
    # odds e^(c - r): log 3 -> p = 3/4; equal -> 1/2
    chosen, rejected = torch.tensor([math.log(3.0), 0.7]), torch.tensor([0.0, 0.7])
    assert bradley_terry_loss(chosen, rejected).tolist() == pytest.approx([math.log(4 / 3), math.log(2)])
    margin = torch.tensor([math.log(3.0), 0.0])  # eats the first gap
    assert bradley_terry_loss(chosen, rejected, margin).tolist() == pytest.approx([math.log(2), math.log(2)])
    centred = bradley_terry_loss(chosen, rejected, centring=0.01)
    assert centred.tolist() == pytest.approx(
        [math.log(4 / 3) + 0.01 * math.log(3) ** 2, math.log(2) + 0.01 * 1.4**2], rel=1e-6
    )


def test_against_the_definition_in_float64_and_by_finite_differences() -> None:
    random = torch.Generator().manual_seed(0)
    c, r, m = (torch.randn(8, dtype=torch.float64, generator=random) for _ in range(3))
    ours = bradley_terry_loss(c, r, m, 0.1).tolist()
    for loss, x, y, z in zip(ours, c.tolist(), r.tolist(), m.tolist(), strict=True):
        assert loss == pytest.approx(-math.log(1 / (1 + math.exp(-(x - y - z)))) + 0.1 * (x + y) ** 2, abs=1e-12)
    inputs = (c.requires_grad_(True), r.requires_grad_(True))
    assert torch.autograd.gradcheck(lambda x, y: bradley_terry_loss(x, y, m, 0.1), inputs)


def test_gaps_of_any_size_stay_finite_and_an_offset_changes_only_the_centring() -> None:
    far = torch.tensor([200.0, -200.0], requires_grad=True)
    loss = bradley_terry_loss(far, torch.zeros(2))
    assert loss.tolist() == pytest.approx([0.0, 200.0], abs=1e-6)
    loss.sum().backward()
    assert far.grad is not None
    assert far.grad.tolist() == pytest.approx([0.0, -1.0], abs=1e-6)
    c, r = torch.tensor([1.0]), torch.tensor([0.25])
    assert torch.equal(bradley_terry_loss(c + 8, r + 8), bradley_terry_loss(c, r))
    assert bradley_terry_loss(c + 8, r + 8, centring=0.1) > bradley_terry_loss(c, r, centring=0.1)


def test_pair_accuracy_counts_ties_as_half() -> None:
    nan = math.nan
    correct = pair_accuracy(torch.tensor([2.0, 1.0, 0.0, nan]), torch.tensor([1.0, 1.0, 3.0, 0.0]))
    assert correct[:3].tolist() == [1.0, 0.5, 0.0]
    assert correct[3].isnan()
    assert pair_accuracy(torch.zeros(9), torch.zeros(9)).mean() == 0.5
    assert pair_accuracy(torch.tensor([math.inf]), torch.tensor([math.inf])).item() == 0.5


def test_half_precision_is_widened_and_bad_arguments_refused() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    assert bradley_terry_loss(half, half).dtype == torch.float32
    assert pair_accuracy(half, half).dtype == torch.float32
    with pytest.raises(ShapeError, match="margin"):
        bradley_terry_loss(half, half, torch.zeros(3))
    with pytest.raises(ShapeError):
        pair_accuracy(half, torch.zeros(2, 1))
    for centring in (-0.1, math.nan):
        with pytest.raises(ConfigError, match="centring"):
            bradley_terry_loss(half, half, centring=centring)
