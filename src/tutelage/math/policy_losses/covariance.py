"""Losses that restrain the few tokens whose updates cost the most entropy   (Cui et al. 2025, 2505.22617).

Shapes: B sequences, T response tokens.  N tokens with mask 1 in the whole mini-batch.

    cov_t = (A_t - mean A) (log pi(y_t) - mean log pi(y)),   means over the N tokens

A token that is likely and has a high advantage makes the policy surer; entropy falls with the mean of cov_t.  Both
losses pick tokens by it, so they need all tokens of the mini-batch at once: the tensors here are those of the whole
mini-batch, not of a part.  The picking has no gradient.  The paper's loss under token_mean.

order_BT: a random number of each token, which decides between candidates; of a token, not of a place in the batch, so
that the choice does not depend on the order of the rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tutelage.errors import ConfigError, closest
from tutelage.math.kl import kl_k3
from tutelage.math.masking import require_same_shape
from tutelage.math.policy_loss import LOG_RATIO_CLAMP, PolicyTerms, policy_terms, ppo_policy_loss
from tutelage.math.policy_losses.inputs import Inputs, inputs_of, require_above

KL_COV_ESTIMATORS = ("abs", "k3")


def clip_cov(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    order_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    fraction: float,
    cov_low: float,
    cov_high: float,
) -> PolicyTerms:
    """PPO's loss, but 0 on max(1, floor(fraction N)) tokens drawn among those with cov_low < cov_t < cov_high.

    Tokens that PPO's own clip holds are not drawn; fewer candidates are all drawn.  The authors switch PPO's clip off
    with a range of 1 on both sides.  `clipped`: by PPO's clip.
    Raises ConfigError unless 0 < fraction <= 1 and cov_low < cov_high, and for a clip range as in `ppo_policy_loss`.
    """
    if not cov_low < cov_high:
        raise ConfigError(f"cov_low is {cov_low} and cov_high is {cov_high}", fix="use an interval, such as 1 to 5")
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    require_same_shape(logp=logp_BT, order=order_BT)
    terms = ppo_policy_loss(x.logp, x.old_logp, x.advantage, clip_low, clip_high)
    cov_BT = covariances(x)
    candidates = x.real & (cov_BT > cov_low) & (cov_BT < cov_high) & ~terms.clipped
    selected = _first(order_BT.double(), candidates, picked(fraction, x.real))
    return replace(terms, loss=terms.loss.masked_fill(selected, 0.0), selected=selected)


def kl_cov(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    order_BT: Tensor,
    *,
    fraction: float,
    coef: float,
    estimator: str = "abs",
) -> PolicyTerms:
    """-r_t A_t, and coef KL(pi_old || pi) beside it on the max(1, floor(fraction N)) tokens with the largest cov_t.

        abs  |log r_t|, what the authors' code has for the KL
        k3   r_t - 1 - log r_t, whose value and gradient are unbiased for KL(pi_old || pi)

    The ratio is not clipped.  order_BT decides between equal covariances.
    Raises ConfigError unless 0 < fraction <= 1 and coef > 0, and for an unknown estimator.
    """
    require_above(coef=coef)
    if estimator not in KL_COV_ESTIMATORS:
        raise ConfigError(
            f"{estimator!r} is no penalty of kl_cov.{closest(estimator, KL_COV_ESTIMATORS)}", fix="use abs or k3"
        )
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    require_same_shape(logp=logp_BT, order=order_BT)
    by_chance = torch.argsort(order_BT.double().flatten(), stable=True)
    by_cov = torch.argsort(covariances(x).flatten()[by_chance], descending=True, stable=True)
    place = torch.empty_like(by_cov)
    place[by_chance[by_cov]] = torch.arange(len(by_cov), device=place.device)
    selected = _first(place.view_as(x.real).double(), x.real, picked(fraction, x.real))
    penalty = x.log_ratio.abs() if estimator == "abs" else kl_k3(x.old_logp, x.logp, LOG_RATIO_CLAMP)
    loss = -x.advantage * x.log_ratio.exp() + coef * penalty.masked_fill(~selected, 0.0)
    return policy_terms(loss, x.logp, x.old_logp, selected=selected)


def covariances(x: Inputs) -> Tensor:
    """cov_BT in float64, without gradient; means over all tokens that count.  Entries under the mask mean nothing."""
    advantage, logp = x.advantage.double(), x.logp.detach().double()
    count = x.real.sum().clamp(min=1)
    return (advantage - advantage.sum() / count) * (logp - logp.sum() / count)


def picked(fraction: float, real_BT: Tensor) -> int:
    """max(1, floor(fraction N)), at most N.  Raises ConfigError unless 0 < fraction <= 1."""
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(f"the share of selected tokens is {fraction}", fix="use a number in (0, 1], such as 0.0002")
    count = int(real_BT.sum())
    return min(count, max(1, math.floor(fraction * count + 1e-9)))


def _first(order_BT: Tensor, candidates_BT: Tensor, count: int) -> Tensor:
    """(B, T) bool: the `count` candidates of smallest order, or all of them where there are fewer."""
    ranked = torch.argsort(order_BT.masked_fill(~candidates_BT, math.inf).flatten(), stable=True)
    selected = torch.zeros_like(candidates_BT).flatten()
    selected[ranked[:count]] = True
    return selected.view_as(candidates_BT) & candidates_BT
