"""Estimators of KL(policy || reference) from sampled tokens, as values and as losses, and the KL-shaped reward.

Shapes: B sequences, T response tokens, N flat tokens, V vocabulary. All in nats.

d = log pi(y) - log ref(y) for a token y drawn from the policy pi, clamped to [-clamp, clamp] (Schulman 2020,
"Approximating KL divergence", names the estimators k1, k2, k3). "As a value" is the expectation over y ~ pi. "As a
loss" is the expectation over y ~ pi of the gradient by the policy's parameters, the draw itself not differentiated; it
holds for on-policy tokens, and where the clamp is not reached (beyond it the gradient is 0 and the value is biased).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError, closest
from tutelage.math.logprobs import scaled_log_softmax
from tutelage.math.masking import (
    at_least_float32,
    last_true,
    masked_mean,
    masked_sum,
    masked_values,
    require_matrix,
    require_same_shape,
)


def clamped_log_ratio(logp: Tensor, ref_logp: Tensor, clamp: float = 20.0) -> Tensor:
    """d = logp - ref_logp, within [-clamp, clamp], in float32 at least; elementwise. Raises ShapeError, ConfigError."""
    require_same_shape(logp=logp, ref_logp=ref_logp)
    if not clamp > 0:
        raise ConfigError(f"the log-ratio clamp is {clamp}", fix="use a bound above 0; 20 nats is the default")
    return (at_least_float32(logp) - at_least_float32(ref_logp)).clamp(-clamp, clamp)


def kl_k1(logp: Tensor, ref_logp: Tensor, clamp: float = 20.0) -> Tensor:
    """k1 = d, elementwise.

    As a value: unbiased for KL(pi || ref); single tokens have either sign; the highest variance of the three.
    As a loss: useless. Its gradient is the score, grad log pi(y), whose expectation is 0 whatever the reference:
    `kl_loss` refuses it. In the *reward* (not differentiated) it is right, and the usual choice.
    """
    return clamped_log_ratio(logp, ref_logp, clamp)


def kl_k2(logp: Tensor, ref_logp: Tensor, clamp: float = 20.0) -> Tensor:
    """k2 = d^2 / 2, elementwise.

    As a value: biased (right to second order in d near pi = ref); never negative; low variance.
    As a loss: expected gradient E[d grad log pi] is exactly the gradient of the reverse KL, KL(pi || ref).
    """
    return 0.5 * clamped_log_ratio(logp, ref_logp, clamp).square()


def kl_k3(logp: Tensor, ref_logp: Tensor, clamp: float = 20.0) -> Tensor:
    """k3 = exp(-d) - 1 + d, elementwise.

    As a value: unbiased for KL(pi || ref) wherever pi covers ref; never negative; low variance near pi = ref, high
    where ref(y) >> pi(y).
    As a loss: expected gradient E[(1 - ref/pi) grad log pi] is that of the *forward* KL, KL(ref || pi): another
    divergence than the one its value estimates.
    """
    log_ratio = clamped_log_ratio(logp, ref_logp, clamp)
    return torch.expm1(-log_ratio) + log_ratio


KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_k3_unbiased(logp: Tensor, ref_logp: Tensor, clamp: float = 20.0) -> Tensor:
    """The value of k3 with the gradient of k2, elementwise: k2 + stopgrad(k3 - k2).

    As a value: k3, unbiased for KL(pi || ref). As a loss: the gradient of the reverse KL, KL(pi || ref), unbiased.
    (verl calls it k3+; Tang and Munos 2025 on why value and gradient of an estimator are two things.)
    """
    k2 = kl_k2(logp, ref_logp, clamp)
    return k2 + (kl_k3(logp, ref_logp, clamp) - k2).detach()


def kl_k3_importance(logp: Tensor, ref_logp: Tensor, clamp: float = 20.0, old_logp: Tensor | None = None) -> Tensor:
    """pi / pi_old * k3, elementwise, both factors differentiated   (DeepSeek-V3.2, 2512.02556, eq. 7).

    For tokens drawn from pi_old, not from pi: value and gradient are unbiased for the reverse KL, KL(pi || ref),
    however many updates lie between; k2 and k3_unbiased are so on tokens of pi itself alone.  Where ref >> pi the
    weight of a token stays bounded, that of k3 does not.  old_logp gets no gradient; None: pi as it is, of ratio 1.
    """
    anchor = logp.detach() if old_logp is None else old_logp.detach()
    return clamped_log_ratio(logp, anchor, clamp).exp() * kl_k3(logp, ref_logp, clamp)


KL_LOSSES: dict[str, Callable[..., Tensor]] = {
    "k2": kl_k2,
    "k3": kl_k3,
    "k3_unbiased": kl_k3_unbiased,
    "k3_importance": kl_k3_importance,
}


def kl_loss(kind: str, logp: Tensor, ref_logp: Tensor, clamp: float = 20.0, old_logp: Tensor | None = None) -> Tensor:
    """The KL term of a loss, elementwise; multiply it by the KL coefficient and the aggregation weights.

    k2: gradient of KL(pi || ref); k3: gradient of KL(ref || pi); k3_unbiased: value of k3, gradient of KL(pi || ref);
    k3_importance: value and gradient of KL(pi || ref) for tokens of pi_old, the only one that reads old_logp.
    ref_logp gets no gradient. Raises ConfigError for k1, whose expected gradient is 0, and for unknown kinds;
    ShapeError when shapes differ.
    """
    if kind == "k1":
        raise ConfigError(
            "k1 cannot be a KL loss: the expectation of its gradient is 0, so it only adds noise",
            fix="use k2 or k3_unbiased in the loss, or put k1 into the reward",
        )
    if kind not in KL_LOSSES:
        raise ConfigError(
            f"{kind!r} is not a KL loss.{closest(kind, KL_LOSSES)}", fix=f"choose one of {', '.join(KL_LOSSES)}"
        )
    if kind == "k3_importance":
        return kl_k3_importance(logp, ref_logp.detach(), clamp, old_logp)
    return KL_LOSSES[kind](logp, ref_logp.detach(), clamp)


def exact_kl(logits_NV: Tensor, ref_logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """kl_N = sum_v p_v (log p_v - log q_v), p and q the softmax of logits and ref_logits over temperature; nats.

    (..., V) each; never negative (`relative_entropy`); infinite where q is 0 and p is not; tokens with p = 0 contribute
    0.  Raises ShapeError when shapes differ, ConfigError for a temperature that is not above 0.
    """
    require_same_shape(logits=logits_NV, ref_logits=ref_logits_NV)
    logp_NV = scaled_log_softmax(logits_NV, temperature)
    ref_logp_NV = scaled_log_softmax(ref_logits_NV, temperature)
    return relative_entropy(logp_NV, ref_logp_NV)


def relative_entropy(log_p_NK: Tensor, log_q_NK: Tensor) -> Tensor:
    """sum_k p_k (log p_k - log q_k) of two distributions over K outcomes, (...); nats.

    Outcomes with p = 0 contribute 0, to the gradient too; infinite where q is 0 and p is not.

    The value is sum_k (p_k d_k - p_k + q_k), d = log p - log q: the same for distributions, and no term is below 0.
    Where p and q are near, rounding of the plain sum is larger than the sum, and of either sign.  The gradient is that
    of the plain sum.
    """
    p_NK = log_p_NK.exp()
    never_NK = p_NK == 0
    d_NK = log_p_NK.masked_fill(never_NK, 0.0) - log_q_NK.masked_fill(never_NK, 0.0)
    plain_N = (p_NK * d_NK).sum(dim=-1)
    with torch.no_grad():
        near_NK = p_NK * (torch.expm1(-d_NK.clamp(-1.0, 1.0)) + d_NK)
        far_NK = (p_NK * (d_NK - 1.0) + log_q_NK.exp()).clamp(min=0.0)
        value_N = torch.where((d_NK.abs() <= 1.0) & ~never_NK, near_NK, far_NK).sum(dim=-1)
        rounding_N = torch.where(plain_N.isfinite(), value_N - plain_N, 0.0)
    return plain_N + rounding_N


def kl_shaped_reward(
    score_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, coef: float, token_reward_BT: Tensor | None = None
) -> Tensor:
    """reward_BT = -coef * kl_t + token_reward_t on tokens with mask 1, plus score_b on the last of them; else 0.

    (Ziegler et al. 2019, Stiennon et al. 2020; with kl = k1 the sum over a row is R = score - coef log(pi / ref).)
    The last token is the last one *the policy produced*, wherever tool tokens or padding end, and whatever its id is.
    A row with an empty mask gets 0 everywhere: nothing in it can be credited with the score. Token rewards under mask 0
    are not paid. score_B: (B,); the others (B, T); coef in reward per nat. Raises ShapeError.
    """
    require_matrix(mask=mask_BT)
    require_same_shape(kl=kl_BT, mask=mask_BT, token_reward=token_reward_BT)
    if score_B.shape != mask_BT.shape[:1]:
        raise ShapeError(
            f"score {tuple(score_B.shape)} does not fit mask {tuple(mask_BT.shape)}", fix="pass one score per sequence"
        )
    reward_BT = -coef * masked_values(kl_BT, mask_BT)
    if token_reward_BT is not None:
        reward_BT = reward_BT + masked_values(token_reward_BT, mask_BT)
    is_last_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device) == last_true(mask_BT).unsqueeze(1)
    return torch.where(is_last_BT, reward_BT + at_least_float32(score_B).unsqueeze(1), reward_BT)


def sequence_kl(kl_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """KL per *sequence* in nats: summed over the row's tokens, mean over the rows that have any; a scalar, 0 when none.

    What Ziegler et al. 2019 control and what a KL budget is stated in. Raises ShapeError.
    """
    require_matrix(mask=mask_BT)
    return masked_sum(kl_BT, mask_BT) / (mask_BT != 0).any(dim=1).sum().clamp(min=1)


def token_kl(kl_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """KL per *token* in nats: mean over the tokens that count; a scalar, 0 when there are none. Raises ShapeError."""
    return masked_mean(kl_BT, mask_BT)
