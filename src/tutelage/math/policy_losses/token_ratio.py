"""Losses of each token's own importance ratio, and the one without any.   Shapes: B sequences, T response tokens.

r_t = pi(y_t) / pi_old(y_t).  All four have the gradient of -A_t log pi(y_t) where r_t = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.errors import ConfigError
from tutelage.math.policy_loss import PolicyTerms, policy_terms, ppo_policy_loss
from tutelage.math.policy_losses.inputs import inputs_of, require_above, require_at_least


def ppo(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """`ppo_policy_loss` of the tokens with mask 1 (Schulman et al. 2017; the paper's loss under token_mean)."""
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    return ppo_policy_loss(x.logp, x.old_logp, x.advantage, clip_low, clip_high, dual_clip)


def reinforce(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> PolicyTerms:
    """-A_t log pi(y_t)   (Williams 1992): the plain policy gradient, for one update on tokens of the policy itself.

    old_logp only feeds the statistics.  seq_mean_token_sum is the estimator of a response's gradient; token_mean is
    what GPG and most code use.
    """
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    return policy_terms(-x.advantage * x.logp, x.logp, x.old_logp)


def cispo(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """-stopgrad(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(y_t)   (MiniMax-M1, 2506.13585).

    The weight is clipped, not the update: every token keeps a gradient.  clip_low = 1 is no lower bound, as in the
    paper.  `clipped`: the weight was cut.  The paper's loss under token_mean.
    Raises ConfigError unless 0 <= clip_low <= 1 and clip_high >= 0.
    """
    require_at_least(0.0, clip_low=clip_low, clip_high=clip_high)
    if clip_low > 1.0:
        raise ConfigError(f"clip_low is {clip_low}", fix="use a number in [0, 1]; 1 is no lower bound")
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    ratio = x.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return policy_terms(-weight * x.advantage * x.logp, x.logp, x.old_logp, ratio=ratio, clipped=weight != ratio)


def sapo(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> PolicyTerms:
    """-(4 / tau) sigmoid(tau (r_t - 1)) A_t, tau that of the sign of A_t   (Gao et al. 2025, 2511.20347).

    A gate in place of a clip: the gradient is that of -r_t A_t times 4 p (1 - p), p = sigmoid(tau (r_t - 1)): 1 where
    r_t = 1, and fading on both sides.  At r_t = 1 the value is -2 A_t / tau.  Nothing counts as clipped.
    tau = temperature_positive where A_t > 0, else temperature_negative.  The paper's loss under seq_mean_token_mean.
    Raises ConfigError unless both are above 0.
    """
    require_above(temperature_positive=temperature_positive, temperature_negative=temperature_negative)
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    ratio = x.log_ratio.exp()
    tau = torch.full_like(ratio, temperature_negative).masked_fill(x.advantage > 0, temperature_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return policy_terms(-gate * x.advantage, x.logp, x.old_logp, ratio=ratio)
