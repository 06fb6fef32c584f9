"""Losses on steps against loops in float64, hand values, finite differences; steps and ensembles as one score."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.process_reward import combined_steps, step_accuracy, step_bce_loss, step_mse_loss
from tutelage.math.reward_loss import bradley_terry_loss, combined_scores, scaled_bradley_terry_loss

SCORE = torch.tensor([0.3, -1.2, 2.0, 0.0], dtype=torch.float64)
LABEL = torch.tensor([1.0, 0.0, 0.25, 1.0], dtype=torch.float64)


def test_step_cross_entropy_is_its_definition_in_float64() -> None:
    wanted = []
    for s, y in zip(SCORE.tolist(), LABEL.tolist(), strict=True):
        p = 1.0 / (1.0 + math.exp(-s))
        wanted.append(-(y * math.log(p) + (1.0 - y) * math.log(1.0 - p)))
    assert step_bce_loss(SCORE, LABEL).tolist() == pytest.approx(wanted, rel=1e-12)
    assert float(step_bce_loss(torch.zeros(1), torch.ones(1))) == pytest.approx(math.log(2.0))
    assert step_bce_loss(torch.tensor([200.0]), torch.tensor([0.0])).tolist() == pytest.approx([200.0])


def test_step_square_by_hand() -> None:
    assert step_mse_loss(torch.tensor([2.0, -1.0]), torch.tensor([0.5, -3.0])).tolist() == [2.25, 4.0]


def test_step_losses_differ_and_their_gradients_are_right() -> None:
    assert float((step_bce_loss(SCORE, LABEL) - step_mse_loss(SCORE, LABEL)).abs().max()) > 1e-3
    for loss in (step_bce_loss, step_mse_loss):
        score = SCORE.clone().requires_grad_(True)
        assert torch.autograd.gradcheck(lambda s, f=loss: f(s, LABEL), (score,))
    with pytest.raises(ShapeError, match="shapes differ"):
        step_bce_loss(SCORE, LABEL[:2])


def test_step_accuracy_by_hand() -> None:
    assert step_accuracy(SCORE, LABEL).tolist() == [1.0, 1.0, 0.0, 0.5]


def test_steps_become_one_score_by_hand() -> None:
    scores, steps = torch.tensor([0.5, 0.8, 0.4, 0.9, 0.25]), torch.tensor([3, 2])
    wanted = {"min": [0.4, 0.25], "product": [0.16, 0.225], "last": [0.4, 0.25], "mean": [1.7 / 3, 0.575]}
    for kind, values in wanted.items():
        assert combined_steps(scores, steps, kind).tolist() == pytest.approx(values), kind
    first = torch.tensor([0.2, 0.8, 0.4])
    found = {kind: float(combined_steps(first, torch.tensor([3]), kind)) for kind in wanted}
    for one, other in itertools.combinations(found, 2):
        assert abs(found[one] - found[other]) > 1e-3, (one, other)


def test_steps_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'mim' does not combine steps. Did you mean min"):
        combined_steps(torch.ones(2), torch.tensor([2]), "mim")
    with pytest.raises(ShapeError, match="2 scores for answers of"):
        combined_steps(torch.ones(2), torch.tensor([2, 0]), "min")


def test_an_ensemble_by_hand_and_by_the_papers_formulas() -> None:
    scores = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, -3.0]], dtype=torch.float64)
    columns = scores.T.tolist()
    spread = [statistics.pstdev(column) for column in columns]
    wanted = {
        "mean": [3.0, -1.0],
        "min": [1.0, -3.0],
        "variance_penalised": [statistics.mean(c) - 0.2 * statistics.pvariance(c) for c in columns],
    }
    for kind, values in wanted.items():
        found, disagreement = combined_scores(scores, kind, 0.2)
        assert found.tolist() == pytest.approx(values), kind
        assert disagreement.tolist() == pytest.approx(spread)
    for one, other in itertools.combinations(wanted, 2):
        assert abs(wanted[one][0] - wanted[other][0]) > 1e-3
    with pytest.raises(ConfigError, match="Did you mean mean"):
        combined_scores(scores, "meen")
    with pytest.raises(ShapeError, match=r"shape \(2,\)"):
        combined_scores(torch.ones(2), "mean")
    with pytest.raises(ConfigError, match="variance_weight is -1"):
        combined_scores(scores, "mean", -1.0)


def test_scaled_bradley_terry_weighs_a_pair_and_leaves_the_gap_it_asks_for() -> None:
    chosen, rejected = SCORE[:2], LABEL[:2]
    margin = torch.tensor([2.0, 0.5], dtype=torch.float64)
    found = scaled_bradley_terry_loss(chosen, rejected, margin, 0.01)
    wanted = []
    for c, r, m in zip(chosen.tolist(), rejected.tolist(), margin.tolist(), strict=True):
        wanted.append(-m * math.log(1.0 / (1.0 + math.exp(r - c))) + 0.01 * (c + r) ** 2)
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    for other in (bradley_terry_loss(chosen, rejected, None, 0.01), bradley_terry_loss(chosen, rejected, margin, 0.01)):
        assert float((found - other).abs().min()) > 1e-3
    assert torch.autograd.gradcheck(
        lambda c, r: scaled_bradley_terry_loss(c, r, margin, 0.01),
        (chosen.clone().requires_grad_(True), rejected.clone().requires_grad_(True)),
    )


def test_logexp_would_be_an_alias() -> None:
    """log(1 + exp(r - c)), which another library calls logexp, is Bradley and Terry's -log sigmoid(c - r)."""
    chosen, rejected = SCORE, LABEL
    alias = torch.log(1 + torch.exp(rejected - chosen))
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected), alias, rtol=1e-12, atol=1e-12)
