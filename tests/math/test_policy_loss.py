"""PPO's clipped loss against scalar Python, branch by branch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.policy_loss import ppo_policy_loss


def scalar_ppo(r: float, a: float, low: float, high: float, dual: float | None) -> tuple[float, float, bool, bool]:
    """(loss, d loss / d logp, clipped, dual clipped), case by case; d r / d logp = r."""
    if a > 0 and r > 1 + high:
        return -a * (1 + high), 0.0, True, False
    if a < 0 and r < 1 - low:
        return -a * (1 - low), 0.0, True, False
    if dual is not None and a < 0 and r > dual:
        return -a * dual, 0.0, False, True
    return -a * r, -a * r, False, False


RATIOS = [0.05, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.29, 1.31, 2.9, 3.1, 50.0]
CASES = [(r, a) for r in RATIOS for a in (2.0, -1.5, 0.0)]


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.3), (1.0, 0.0)])
def test_every_branch_has_its_value_gradient_and_flags(low: float, high: float, dual: float | None) -> None:
    old = torch.full((len(CASES),), -2.0, dtype=torch.float64)
    logp = (old + torch.tensor([math.log(r) for r, _ in CASES], dtype=torch.float64)).requires_grad_(True)
    advantage = torch.tensor([a for _, a in CASES], dtype=torch.float64)
    terms = ppo_policy_loss(logp, old, advantage, low, high, dual)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logp)
    for i, (r, a) in enumerate(CASES):
        if (low, high, r) == (1.0, 0.0, 1.0):
            continue  # on the kink
        loss, slope, clipped, dual_clipped = scalar_ppo(r, a, low, high, dual)
        assert terms.loss[i].item() == pytest.approx(loss, abs=1e-12)
        assert gradient[i].item() == pytest.approx(slope, abs=1e-12)
        assert terms.clipped[i].item() == clipped
        assert terms.dual_clipped[i].item() == dual_clipped
        assert terms.ratio[i].item() == pytest.approx(r)


def test_before_any_update_the_gradient_is_the_policy_gradient() -> None:
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.5])
    terms = ppo_policy_loss(logp, logp.detach(), advantage, 0.2, 0.2)
    terms.loss.sum().backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -advantage)  # -A grad logp
    assert terms.ratio.tolist() == [1.0, 1.0, 1.0]
    assert terms.approx_kl.tolist() == [0.0, 0.0, 0.0]
    assert not terms.clipped.any()


def test_gradcheck_away_from_kinks_on_a_matrix() -> None:
    random = torch.Generator().manual_seed(0)
    logp = torch.randn(3, 4, dtype=torch.float64, generator=random).requires_grad_(True)
    old, advantage = (torch.randn(3, 4, dtype=torch.float64, generator=random) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x: ppo_policy_loss(x, old, advantage, 0.2, 0.28, 3.0).loss, logp)


def test_approx_kl_is_an_unbiased_kl_of_old_against_new() -> None:
    old_p, new_p = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    old, new = (torch.tensor([math.log(p) for p in ps], dtype=torch.float64) for ps in (old_p, new_p))
    approx = ppo_policy_loss(new, old, torch.zeros(3, dtype=torch.float64), 0.2, 0.2).approx_kl
    expected = sum(p * math.log(p / q) for p, q in zip(old_p, new_p, strict=True))
    assert sum(p * k for p, k in zip(old_p, approx.tolist(), strict=True)) == pytest.approx(expected, abs=1e-12)
    assert (approx >= 0).all()


def test_huge_ratios_stay_finite() -> None:
    logp = torch.tensor([0.0, -1000.0], requires_grad=True)
    terms = ppo_policy_loss(logp, torch.tensor([-1000.0, 0.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.2)
    assert terms.ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)
    assert terms.loss.isfinite().all()
    terms.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


def test_only_logp_gets_gradient_and_only_through_the_loss() -> None:
    leaves = [torch.tensor([x], requires_grad=True) for x in (-1.0, -1.1, 2.0)]
    terms = ppo_policy_loss(leaves[0], leaves[1], leaves[2], 0.2, 0.2)
    terms.loss.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None
    for statistic in (terms.ratio, terms.clipped, terms.dual_clipped, terms.approx_kl):
        assert not statistic.requires_grad


def test_bad_arguments_are_refused() -> None:
    x = torch.zeros(2)

    def loss(low: float = 0.2, high: float = 0.2, dual: float | None = None, advantage: Tensor = x) -> None:
        ppo_policy_loss(x, x, advantage, low, high, dual)

    for bad_low in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match="lower clip range"):
            loss(low=bad_low)
    for bad_high in (-0.1, math.nan):
        with pytest.raises(ConfigError, match="upper clip range"):
            loss(high=bad_high)
    for bad_dual in (1.0, 0.5, math.nan):
        with pytest.raises(ConfigError, match="dual_clip"):
            loss(dual=bad_dual)
    with pytest.raises(ShapeError, match="advantage"):
        loss(advantage=torch.zeros(2, 1))
