"""DPO's sigmoid against its definition, by hand, and its limits; what all losses share is in test_preference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.preference import PREFERENCE_LOSSES, PreferenceInputs, PreferenceSettings, PreferenceTerms


def dpo(c: Any, r: Any, rc: Any, rr: Any, beta: float, smoothing: float = 0.0) -> PreferenceTerms:
    settings = PreferenceSettings(beta=beta, label_smoothing=smoothing)
    return PREFERENCE_LOSSES["sigmoid"](PreferenceInputs.of(c, r, rc, rr), settings)


def test_by_hand() -> None:
    # log ratios: chosen +2, rejected -1, beta log(3) / 3: z = log 3, sigmoid 3/4
    beta = math.log(3.0) / 3.0
    c, r, rc, rr = (torch.tensor([x]) for x in (-1.0, -5.0, -3.0, -4.0))
    assert dpo(c, r, rc, rr, beta).loss.item() == pytest.approx(math.log(4 / 3))
    smooth = dpo(c, r, rc, rr, beta, 0.1)
    assert smooth.loss.item() == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4))
    assert smooth.reward_chosen.item() == pytest.approx(2 * beta)
    assert smooth.reward_rejected.item() == pytest.approx(-beta)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_against_the_definition_in_float64_and_by_finite_differences(smoothing: float) -> None:
    random = torch.Generator().manual_seed(0)
    c, r, rc, rr = (3 * torch.randn(8, dtype=torch.float64, generator=random) for _ in range(4))
    ours = dpo(c, r, rc, rr, 0.3, smoothing).loss.tolist()
    for loss, a, b, x, y in zip(ours, c.tolist(), r.tolist(), rc.tolist(), rr.tolist(), strict=True):
        p = 1 / (1 + math.exp(-0.3 * ((a - x) - (b - y))))
        assert loss == pytest.approx(-(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p), abs=1e-12)
    inputs = (c.requires_grad_(True), r.requires_grad_(True))
    assert torch.autograd.gradcheck(lambda u, v: dpo(u, v, rc, rr, 0.3, smoothing).loss, inputs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_it_starts_at_log_two(smoothing: float) -> None:
    logp = torch.tensor([-40.0, -3.5])
    loss = dpo(logp, logp - 7, logp, logp - 7, 0.1, smoothing).loss
    assert loss.tolist() == pytest.approx([math.log(2)] * 2, abs=1e-6)


def test_smoothed_labels_have_their_least_loss_at_the_log_odds() -> None:
    z = torch.tensor([math.log(9.0)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    dpo(z, zero, zero, zero, 1.0, 0.1).loss.sum().backward()
    assert z.grad is not None
    assert z.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_gaps_of_any_size_stay_finite_and_the_reference_gets_no_gradient() -> None:
    leaves = [torch.tensor([x, -x], requires_grad=True) for x in (500.0, -500.0, 1.0, 2.0)]
    loss = dpo(*leaves, 1.0).loss  # z = (500 - 1) - (-500 - 2) = 1001, and its mirror
    assert loss.tolist() == pytest.approx([0.0, 1001.0])
    loss.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[0].grad.tolist() == pytest.approx([0.0, -1.0], abs=1e-6)
    assert leaves[2].grad is None
    assert leaves[3].grad is None


def test_bad_arguments_are_refused() -> None:
    x = torch.zeros(2)
    for beta in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="beta"):
            dpo(x, x, x, x, beta)
    for smoothing in (-0.1, 0.5, math.nan):
        with pytest.raises(ConfigError, match="label_smoothing"):
            dpo(x, x, x, x, 0.1, smoothing)
    with pytest.raises(ShapeError, match="ref_chosen"):
        dpo(x, x, torch.zeros(3), x, 0.1)
