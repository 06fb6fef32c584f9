"""KL estimators: what they are as values and as losses, by enumeration over a small vocabulary; the shaped reward."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats as scipy_stats
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.kl import (
    KL_ESTIMATORS,
    KL_LOSSES,
    exact_kl,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_loss,
    kl_shaped_reward,
    sequence_kl,
    token_kl,
)

NAN = float("nan")
LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.0, 0.7], dtype=torch.float64)
REF_LOGITS = torch.tensor([-0.5, 0.4, 1.0, 0.9, -2.0], dtype=torch.float64)


def probabilities(logits: Tensor) -> list[float]:
    powers = [math.exp(z) for z in logits.tolist()]
    return [p / sum(powers) for p in powers]


P, Q = probabilities(LOGITS), probabilities(REF_LOGITS)
LOG_RATIO = [math.log(p / q) for p, q in zip(P, Q, strict=True)]
REVERSE_KL = sum(p * d for p, d in zip(P, LOG_RATIO, strict=True))
# By hand, for pi = softmax(z): d KL(pi || ref) / dz_j = pi_j (d_j - KL),   d KL(ref || pi) / dz_j = pi_j - ref_j.
REVERSE_KL_GRADIENT = [p * (d - REVERSE_KL) for p, d in zip(P, LOG_RATIO, strict=True)]
FORWARD_KL_GRADIENT = [p - q for p, q in zip(P, Q, strict=True)]


def expected_gradient(kind: str) -> list[float]:
    """sum_y pi(y) d loss(y) / d logits, the outer pi(y) not differentiated: an exact expectation over samples."""
    estimators = KL_LOSSES | KL_ESTIMATORS
    logits = LOGITS.clone().requires_grad_(True)
    per_token = estimators[kind](torch.log_softmax(logits, -1), torch.log_softmax(REF_LOGITS, -1))
    (torch.tensor(P, dtype=torch.float64) * per_token).sum().backward()
    assert logits.grad is not None
    return logits.grad.tolist()


def expected_value(kind: str) -> float:
    per_token = (KL_LOSSES | KL_ESTIMATORS)[kind](torch.log_softmax(LOGITS, -1), torch.log_softmax(REF_LOGITS, -1))
    return sum(p * k for p, k in zip(P, per_token.tolist(), strict=True))


@pytest.mark.parametrize("kind", ["k1", "k3", "k3_unbiased"])
def test_unbiased_values(kind: str) -> None:
    assert expected_value(kind) == pytest.approx(REVERSE_KL, abs=1e-12)


def test_k2_is_a_biased_value() -> None:
    second_moment = sum(p * d * d for p, d in zip(P, LOG_RATIO, strict=True))
    assert expected_value("k2") == pytest.approx(second_moment / 2, abs=1e-12)
    assert abs(expected_value("k2") - REVERSE_KL) > 0.05  # 0.63 for a KL of 0.55


@pytest.mark.parametrize("kind", ["k2", "k3_unbiased"])
def test_losses_with_the_gradient_of_the_reverse_kl(kind: str) -> None:
    assert expected_gradient(kind) == pytest.approx(REVERSE_KL_GRADIENT, abs=1e-12)


def test_k3_as_a_loss_has_the_gradient_of_the_forward_kl() -> None:
    assert expected_gradient("k3") == pytest.approx(FORWARD_KL_GRADIENT, abs=1e-12)
    assert expected_gradient("k3") != pytest.approx(REVERSE_KL_GRADIENT, abs=1e-2)


def test_k1_as_a_loss_has_expected_gradient_zero_and_is_refused() -> None:
    assert expected_gradient("k1") == pytest.approx([0.0] * 5, abs=1e-12)
    with pytest.raises(ConfigError, match="expectation of its gradient is 0"):
        kl_loss("k1", torch.zeros(2), torch.zeros(2))


def test_the_closed_form_gradients_are_right_by_finite_differences() -> None:
    def kl(a: list[float], b: list[float]) -> float:
        return float(scipy_stats.entropy(a, b))

    for j in range(5):
        step = torch.zeros(5, dtype=torch.float64)
        step[j] = 1e-6
        up, down = probabilities(LOGITS + step), probabilities(LOGITS - step)
        assert (kl(up, Q) - kl(down, Q)) / 2e-6 == pytest.approx(REVERSE_KL_GRADIENT[j], abs=1e-8)
        assert (kl(Q, up) - kl(Q, down)) / 2e-6 == pytest.approx(FORWARD_KL_GRADIENT[j], abs=1e-8)


def test_estimators_by_hand_and_their_signs() -> None:
    logp, ref = torch.tensor([math.log(0.5), math.log(0.25)]), torch.tensor([math.log(0.25), math.log(0.5)])
    two = math.log(2.0)
    assert kl_k1(logp, ref).tolist() == pytest.approx([two, -two])
    assert kl_k2(logp, ref).tolist() == pytest.approx([two**2 / 2, two**2 / 2])
    assert kl_k3(logp, ref).tolist() == pytest.approx([0.5 - 1 + two, 2.0 - 1 - two])
    assert kl_loss("k3_unbiased", logp, ref).tolist() == pytest.approx(kl_k3(logp, ref).tolist())


def test_k3_is_accurate_for_tiny_ratios_in_float32() -> None:
    logp = torch.tensor([0.0]), torch.tensor([-1e-3])
    assert kl_k3(*logp).item() == pytest.approx(math.exp(-1e-3) - 1 + 1e-3, rel=2e-3)  # about d^2/2 = 5e-7


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_log_ratio_is_clamped_and_half_precision_widened(kind: str) -> None:
    far = torch.tensor([0.0, -1000.0]).bfloat16()
    value = KL_ESTIMATORS[kind](far, far.flip(0), 2.0)
    assert value.dtype == torch.float32
    by_hand = {"k1": (2.0, -2.0), "k2": (2.0, 2.0), "k3": (math.exp(-2) + 1, math.exp(2) - 3)}
    assert value.tolist() == pytest.approx(by_hand[kind])
    assert KL_ESTIMATORS[kind](far, far.flip(0)).isfinite().all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_gradcheck_and_shapes(kind: str) -> None:
    logp = torch.randn(3, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    ref = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[kind](x, ref), logp)
    with pytest.raises(ShapeError):
        KL_ESTIMATORS[kind](logp, ref[:, :1])
    with pytest.raises(ConfigError, match="clamp"):
        KL_ESTIMATORS[kind](logp, ref, 0.0)


def test_a_kl_loss_sends_no_gradient_to_the_reference_and_names_its_kinds() -> None:
    logp, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    for kind in KL_LOSSES:
        kl_loss(kind, logp, ref).sum().backward()
    assert ref.grad is None
    assert logp.grad is not None
    with pytest.raises(ConfigError, match="Did you mean k3_unbiased"):
        kl_loss("k3_unbiassed", logp, ref)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_kl_is_scipys(temperature: float) -> None:
    p, q = probabilities(LOGITS / temperature), probabilities(REF_LOGITS / temperature)
    ours = exact_kl(LOGITS.unsqueeze(0), REF_LOGITS.unsqueeze(0), temperature)
    assert ours.item() == pytest.approx(float(scipy_stats.entropy(p, q)), abs=1e-12)


def test_exact_kl_limits_gradient_and_excluded_tokens() -> None:
    logits = LOGITS.clone().unsqueeze(0).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda z: exact_kl(z, REF_LOGITS.unsqueeze(0)), logits)
    exact_kl(logits, REF_LOGITS.unsqueeze(0)).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx(REVERSE_KL_GRADIENT, abs=1e-12)
    assert exact_kl(LOGITS.unsqueeze(0), LOGITS.unsqueeze(0)).item() == 0.0
    out = torch.tensor([[0.0, 0.0, float("-inf")]])
    assert exact_kl(out, torch.zeros(1, 3)).item() == pytest.approx(math.log(1.5))  # halves against thirds
    assert exact_kl(out, out).item() == 0.0
    assert exact_kl(torch.zeros(1, 3), out).item() == float("inf")
    with pytest.raises(ShapeError):
        exact_kl(torch.zeros(2, 3), torch.zeros(1, 3))


# --- the shaped reward ------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
KL = torch.tensor([[0.5, -1.0, NAN, 2.0, NAN], [3.0, NAN, NAN, NAN, NAN], [NAN] * 5])


def test_shaped_reward_by_hand_with_a_hole_padding_and_an_empty_row() -> None:
    reward = kl_shaped_reward(torch.tensor([10.0, -4.0, 7.0]), KL, MASK, coef=0.1)
    expected = [[-0.05, 0.1, 0.0, -0.2 + 10.0, 0.0], [-0.3 - 4.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 5]
    torch.testing.assert_close(reward, torch.tensor(expected))


def test_token_rewards_are_paid_on_the_policys_tokens_only() -> None:
    token_reward = torch.tensor([[1.0, 2.0, NAN, 3.0, NAN], [4.0, NAN, NAN, NAN, NAN], [NAN] * 5])
    reward = kl_shaped_reward(torch.zeros(3), KL, MASK, 0.0, token_reward)
    assert reward.tolist() == [[1, 2, 0, 3, 0], [4, 0, 0, 0, 0], [0] * 5]


def test_the_rewards_of_a_row_sum_to_score_minus_coef_times_sequence_kl() -> None:
    random = torch.Generator().manual_seed(0)
    kl, score = torch.randn(3, 5, dtype=torch.float64, generator=random), torch.randn(3, dtype=torch.float64)
    reward = kl_shaped_reward(score, kl, MASK, 0.3)
    for b in range(2):
        row_kl = sum(k for k, m in zip(kl[b].tolist(), MASK[b].tolist(), strict=True) if m)
        assert reward[b].sum().item() == pytest.approx(score[b].item() - 0.3 * row_kl)


def test_shaped_reward_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match="one score per sequence"):
        kl_shaped_reward(torch.zeros(2), KL, MASK, 0.1)
    with pytest.raises(ShapeError, match="token_reward"):
        kl_shaped_reward(torch.zeros(3), KL, MASK, 0.1, torch.zeros(3, 4))


def test_sequence_and_token_kl_by_hand() -> None:
    # rows sum to 1.5 and 3, the third has no token: (1.5 + 3) / 2 per sequence, 4.5 / 4 per token
    assert sequence_kl(KL, MASK).item() == 2.25
    assert token_kl(KL, MASK).item() == 1.125
    assert sequence_kl(KL, torch.zeros(3, 5)).item() == 0.0
    assert token_kl(KL, torch.zeros(3, 5)).item() == 0.0
