"""Losses of the policy's logprobs alone.   Shapes: P pairs.

p = log pi(y | x) / |y| is the mean logprob of an answer's tokens, w the chosen answer, l the rejected one.  All (P,).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tutelage.math.preference.gap import smoothed_logistic
from tutelage.math.preference.inputs import PreferenceInputs, PreferenceSettings, PreferenceTerms

LARGEST_LOGPROB = -1e-6
"""Nearer to 0 the odds of an answer are taken as those at this mean logprob; their gradient is 0 there."""


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0, exact at both ends."""
    near = x > -math.log(2.0)
    close = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, close, far)


def log_odds(mean_logp: Tensor) -> Tensor:
    """log(P / (1 - P)), P = exp(mean logprob)."""
    bounded = mean_logp.clamp(max=LARGEST_LOGPROB)
    return bounded - log1mexp(bounded)


def means(x: PreferenceInputs) -> tuple[Tensor, Tensor]:
    """(chosen_P, rejected_P): logprobs per trained token."""
    return x.chosen_logp / x.chosen_len, x.rejected_logp / x.rejected_len


def orpo(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-lambda log sigmoid(log odds(p_w) - log odds(p_l))   (ORPO, Hong et al. 2024, arXiv:2403.07691, eq. 7).

    lambda is `beta`.  The paper's L_SFT, eq. 6, is `chosen_nll` with weight 1 (`config.dpo.OWN_NLL`).
    """
    chosen_P, rejected_P = means(x)
    loss_P = -cfg.beta * logsigmoid(log_odds(chosen_P) - log_odds(rejected_P))
    return PreferenceTerms.of(loss_P, cfg.beta * chosen_P, cfg.beta * rejected_P)


def cpo(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-log sigmoid(beta (log pi_w - log pi_l))   (CPO, Xu et al. 2024, arXiv:2401.08417, eq. 3).

    DPO under a uniform reference.  The paper's L_NLL is `chosen_nll` with weight 1 (`config.dpo.OWN_NLL`).
    """
    chosen_P, rejected_P = cfg.beta * x.chosen_logp, cfg.beta * x.rejected_logp
    return PreferenceTerms.of(smoothed_logistic(chosen_P - rejected_P, cfg.label_smoothing), chosen_P, rejected_P)


def simpo(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-log sigmoid(beta p_w - beta p_l - gamma)   (SimPO, Meng et al. 2024, arXiv:2405.14734, eq. 6)."""
    chosen_P, rejected_P = (cfg.beta * side_P for side_P in means(x))
    gap_P = chosen_P - rejected_P - cfg.gamma
    return PreferenceTerms.of(smoothed_logistic(gap_P, cfg.label_smoothing), chosen_P, rejected_P)


def alphapo(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-log sigmoid(r_w - r_l - gamma), r = beta (1 - exp(-alpha p)) / alpha.

    (AlphaPO, Gupta et al. 2025, arXiv:2501.03884.)
    Towards alpha = 0 it is SimPO; above 0 the reward of an unlikely answer falls faster.
    """
    chosen_P, rejected_P = (-cfg.beta * torch.expm1(-cfg.alpha * side_P) / cfg.alpha for side_P in means(x))
    gap_P = chosen_P - rejected_P - cfg.gamma
    return PreferenceTerms.of(smoothed_logistic(gap_P, cfg.label_smoothing), chosen_P, rejected_P)
