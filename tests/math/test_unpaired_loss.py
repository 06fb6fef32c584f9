"""KTO, APO-zero and BCO on single answers against loops in float64, hand values and finite differences."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.unpaired_loss import (
    RewardShift,
    UnpairedTerms,
    apo_zero_unpaired_loss,
    bco_loss,
    kto_loss,
    kto_reference_point,
    rank_accuracy,
)

RATIO = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.25], dtype=torch.float64)
DESIRABLE = torch.tensor([True, False, False, True, True])
POINT = torch.tensor(0.4, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def kto_by_the_paper(
    ratio: list[float], desirable: list[bool], z0: float, beta: float, d: float, u: float
) -> list[float]:
    """lambda_y - v(x, y), as section 4.1 of the paper has it."""
    out = []
    for r, good in zip(ratio, desirable, strict=True):
        value = d * sigmoid(beta * (r - z0)) if good else u * sigmoid(beta * (z0 - r))
        out.append((d if good else u) - value)
    return out


def losses() -> dict[str, UnpairedTerms]:
    return {
        "kto": kto_loss(RATIO, DESIRABLE, POINT, 0.5),
        "apo_zero_unpaired": apo_zero_unpaired_loss(RATIO, DESIRABLE, 0.5),
        "bco": bco_loss(RATIO, DESIRABLE, torch.full_like(RATIO, 0.1), 0.5),
    }


def test_kto_is_the_papers_in_float64() -> None:
    found = kto_loss(RATIO, DESIRABLE, POINT, 0.5, 1.3, 0.7)
    wanted = kto_by_the_paper(RATIO.tolist(), DESIRABLE.tolist(), 0.4, 0.5, 1.3, 0.7)
    assert found.loss.tolist() == pytest.approx(wanted, rel=1e-12)
    assert found.reward.tolist() == pytest.approx([0.5 * r for r in RATIO.tolist()], rel=1e-12)


def test_kto_by_hand() -> None:
    """beta 1, r - z0 = ln 3: sigmoid is 3/4, so a desirable answer loses 1/4 and an undesirable one 3/4."""
    ratio = torch.tensor([math.log(3.0) + 0.2, math.log(3.0) + 0.2])
    found = kto_loss(ratio, torch.tensor([True, False]), torch.tensor(0.2), 1.0, 2.0, 1.0)
    assert found.loss.tolist() == pytest.approx([0.5, 0.75], rel=1e-6)


def test_policy_equal_to_the_reference_loses_one_half_and_bco_log_two() -> None:
    zero = torch.zeros(5)
    point = kto_reference_point(zero)
    assert float(point) == 0.0
    assert kto_loss(zero, DESIRABLE, point, 0.1).loss.tolist() == [0.5] * 5
    assert apo_zero_unpaired_loss(zero, DESIRABLE, 0.1).loss.tolist() == [0.5] * 5
    assert bco_loss(zero, DESIRABLE, zero, 0.1).loss.tolist() == pytest.approx([math.log(2.0)] * 5)


def test_the_reference_point_is_a_clamped_mean_without_gradient() -> None:
    ratios = torch.tensor([1.0, 3.0, -1.0], requires_grad=True)
    assert float(kto_reference_point(ratios)) == pytest.approx(1.0)
    assert not kto_reference_point(ratios).requires_grad
    assert float(kto_reference_point(torch.tensor([1.0, -3.0]))) == 0.0, "a KL is not negative"


def test_apo_zero_by_hand() -> None:
    ratio = torch.tensor([math.log(3.0), math.log(3.0)])
    found = apo_zero_unpaired_loss(ratio, torch.tensor([True, False]), 1.0)
    assert found.loss.tolist() == pytest.approx([0.25, 0.75], rel=1e-6)


def test_bco_is_the_cross_entropy_of_a_classifier() -> None:
    shift = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
    found = bco_loss(RATIO, DESIRABLE, shift, 0.5)
    wanted = []
    for r, good in zip(RATIO.tolist(), DESIRABLE.tolist(), strict=True):
        p = sigmoid(0.5 * r - 0.1)
        wanted.append(-math.log(p if good else 1.0 - p))
    assert found.loss.tolist() == pytest.approx(wanted, rel=1e-12)
    far = bco_loss(torch.tensor([-1e4, 1e4]), torch.tensor([True, False]), torch.zeros(2), 1.0)
    assert far.loss.tolist() == pytest.approx([1e4, 1e4]), "no overflow"


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired", "bco"])
def test_gradients_by_finite_differences(name: str) -> None:
    def loss(ratio: Tensor) -> Tensor:
        if name == "kto":
            return kto_loss(ratio, DESIRABLE, POINT, 0.5, 1.3, 0.7).loss
        if name == "bco":
            return bco_loss(ratio, DESIRABLE, torch.full_like(ratio, 0.3), 0.5).loss
        return apo_zero_unpaired_loss(ratio, DESIRABLE, 0.5, 1.3, 0.7).loss

    assert torch.autograd.gradcheck(loss, (RATIO.clone().requires_grad_(True),))


def test_no_two_names_are_one_loss() -> None:
    found = losses()
    for first, second in itertools.combinations(found, 2):
        assert float((found[first].loss - found[second].loss).abs().max()) > 1e-3, (first, second)


def test_desirable_answers_rise_and_undesirable_ones_fall() -> None:
    for name in losses():
        ratio = torch.zeros(2, requires_grad=True)
        kinds = torch.tensor([True, False])
        terms = {
            "kto": lambda r=ratio, k=kinds: kto_loss(r, k, torch.tensor(0.0), 0.1),
            "apo_zero_unpaired": lambda r=ratio, k=kinds: apo_zero_unpaired_loss(r, k, 0.1),
            "bco": lambda r=ratio, k=kinds: bco_loss(r, k, torch.zeros(2), 0.1),
        }[name]()
        terms.loss.sum().backward()
        assert ratio.grad is not None
        assert ratio.grad[0] < 0 < ratio.grad[1], name


@pytest.mark.parametrize("kind", [True, False])
def test_a_batch_of_one_kind_has_no_nan(kind: bool) -> None:
    kinds = torch.full((3,), kind)
    ratio = torch.tensor([0.1, -0.2, 0.3])
    for terms in (
        kto_loss(ratio, kinds, kto_reference_point(ratio), 0.1),
        apo_zero_unpaired_loss(ratio, kinds, 0.1),
        bco_loss(ratio, kinds, torch.full((3,), RewardShift().after(ratio, kinds).delta), 0.1),
    ):
        assert bool(torch.isfinite(terms.loss).all())
    assert rank_accuracy(ratio, kinds) is None


def test_the_reward_shift_is_the_mean_of_both_means_whatever_the_batches() -> None:
    rewards = [(2.0, True), (4.0, True), (-1.0, False), (1.0, True), (-3.0, False)]
    good = [r for r, kind in rewards if kind]
    bad = [r for r, kind in rewards if not kind]
    wanted = 0.5 * sum(good) / len(good) + 0.5 * sum(bad) / len(bad)
    assert RewardShift().delta == 0.0
    assert RewardShift().after(torch.tensor([2.0, 4.0]), torch.tensor([True, True])).delta == pytest.approx(3.0)
    for cut in (1, 2, 3):
        shift = RewardShift()
        for part in (rewards[:cut], rewards[cut:]):
            shift = shift.after(torch.tensor([r for r, _ in part]), torch.tensor([k for _, k in part]))
        assert shift.delta == pytest.approx(wanted)


def test_rank_accuracy_counts_the_pairs() -> None:
    random.seed(3)
    for _ in range(20):
        rewards = [random.choice([-1.0, 0.0, 0.5, 2.0]) for _ in range(7)]
        kinds = [random.random() < 0.5 for _ in range(7)]
        if all(kinds) or not any(kinds):
            continue
        pairs = [
            (a, b)
            for a, k in zip(rewards, kinds, strict=True)
            if k
            for b, j in zip(rewards, kinds, strict=True)
            if not j
        ]
        wanted = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
        assert rank_accuracy(torch.tensor(rewards), torch.tensor(kinds)) == pytest.approx(wanted)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ShapeError, match="shapes differ"):
        kto_loss(RATIO, DESIRABLE[:4], POINT, 0.1)
    with pytest.raises(ConfigError, match="beta of the unpaired loss is 0"):
        apo_zero_unpaired_loss(RATIO, DESIRABLE, 0.0)
    with pytest.raises(ConfigError, match="undesirable_weight is -1"):
        kto_loss(RATIO, DESIRABLE, POINT, 0.1, 1.0, -1.0)
    with pytest.raises(ShapeError, match="shapes differ"):
        bco_loss(RATIO, DESIRABLE, torch.zeros(()), 0.1)
