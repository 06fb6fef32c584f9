"""Losses that compare whole responses: one geometric-mean importance ratio for all tokens of a row.

Shapes: B sequences, T response tokens.  n_b tokens with mask 1 in row b.

Every token with mask 1 carries its row's value, so that the weights of any aggregation apply; with seq_mean_token_mean,
which is the papers' loss, a row weighs 1 / B'.  A row without tokens has loss 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tutelage.errors import ConfigError, closest
from tutelage.math.kl import kl_k3
from tutelage.math.policy_loss import LOG_RATIO_CLAMP, PolicyTerms, policy_terms, ppo_policy_loss
from tutelage.math.policy_losses.inputs import inputs_of, require_above, row_mean

GSPO_FORMS = ("token", "sequence")


def gspo(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    form: str = "token",
) -> PolicyTerms:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)   (Zheng et al. 2025, 2507.18071; GSPO and GSPO-token).

        s_b = exp(1 / n_b sum_t log(pi(y_t) / pi_old(y_t)))

        sequence  s = s_b, A the mean advantage of the row's tokens
        token     s = stopgrad(s_b) pi(y_t) / stopgrad(pi(y_t)), A = A_t: the value of s_b, each token's own gradient

    Both have the same value and gradient where a row has one advantage (GRPO).  A row is clipped as a whole, the signs
    of A_t allowing.  The ratios of rows are far nearer to 1 than those of tokens, hence the paper's range 3e-4, 4e-4.
    Raises ConfigError for an unknown form or a clip range as in `ppo_policy_loss`.
    """
    if form not in GSPO_FORMS:
        raise ConfigError(f"{form!r} is no form of gspo.{closest(form, GSPO_FORMS)}", fix="use token or sequence")
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    log_s_B1 = row_mean(x.logp - x.old_logp, x.real).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    if form == "token":
        log_s_BT, advantage = log_s_B1.detach() + (x.logp - x.logp.detach()), x.advantage
    else:
        log_s_BT = log_s_B1.expand_as(x.logp)
        advantage = row_mean(x.advantage, x.real).expand_as(x.logp).masked_fill(~x.real, 0.0)
    terms = ppo_policy_loss(log_s_BT, torch.zeros_like(log_s_BT), advantage, clip_low, clip_high)
    return replace(terms, approx_kl=kl_k3(x.old_logp, x.logp.detach(), LOG_RATIO_CLAMP))


def gmpo(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """-A exp(1 / n_b sum_t d_t), d_t the clipped log ratio of a token   (Zhao et al. 2025, 2507.20673).

        d_t = min(log r_t, clip_high) where A > 0,  max(log r_t, -clip_low) where A < 0

    that is PPO's one-sided clip in log space: the range of r_t is exp(-clip_low) to exp(clip_high).  A is the mean
    advantage of the row's tokens (the paper has one per response).  `clipped` is of tokens, `ratio` of rows.
    Raises ConfigError unless both ranges are above 0.
    """
    require_above(clip_low=clip_low, clip_high=clip_high)
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    advantage_B1 = row_mean(x.advantage, x.real)
    above = (advantage_B1 > 0) & (x.log_ratio > clip_high)
    below = (advantage_B1 < 0) & (x.log_ratio < -clip_low)
    clipped_BT = x.log_ratio.masked_fill(above, clip_high).masked_fill(below, -clip_low)
    ratio_BT = row_mean(clipped_BT, x.real).exp().expand_as(x.logp)
    loss_BT = (-advantage_B1 * ratio_BT).masked_fill(~x.real, 0.0)
    return policy_terms(loss_BT, x.logp, x.old_logp, ratio=ratio_BT, clipped=above | below)
