"""Losses that look at the log ratio of each answer by itself, not at the gap alone.   Shapes: P pairs.

r = beta log pi / ref is the implicit reward of an answer, w the chosen one, l the rejected one.
All are (P,) and not averaged.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tutelage.math.preference.inputs import PreferenceInputs, PreferenceSettings, PreferenceTerms


def ratio_rewards(x: PreferenceInputs, cfg: PreferenceSettings) -> tuple[Tensor, Tensor]:
    """(chosen_P, rejected_P): beta times the log ratios."""
    return cfg.beta * x.log_ratio_chosen, cfg.beta * x.log_ratio_rejected


def nca_pair(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-log sigmoid(r_w) - 1/2 log sigmoid(-r_w) - 1/2 log sigmoid(-r_l)   (NCA, Chen et al. 2024, arXiv:2402.05369).

    Noise contrast against the reference: it holds up the likelihood of the chosen answer itself.  Starts at 2 log 2.
    """
    chosen_P, rejected_P = ratio_rewards(x, cfg)
    loss_P = -logsigmoid(chosen_P) - 0.5 * logsigmoid(-chosen_P) - 0.5 * logsigmoid(-rejected_P)
    return PreferenceTerms.of(loss_P, chosen_P, rejected_P)


def bco_pair(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-log sigmoid(r_w - delta) - log sigmoid(-(r_l - delta))   (BCO, Jung et al. 2024, arXiv:2404.04656).

    A binary classifier whose threshold delta is the mean reward of all answers so far, this mini-batch included.
    """
    chosen_P, rejected_P = ratio_rewards(x, cfg)
    loss_P = -logsigmoid(chosen_P - x.delta) - logsigmoid(x.delta - rejected_P)
    return PreferenceTerms.of(loss_P, chosen_P, rejected_P)


def sppo_hard(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """(log ratio_w - 1 / (2 beta))^2 + (log ratio_l + 1 / (2 beta))^2.

    (SPPO, Wu et al. 2024, arXiv:2405.00675, eq. 4.7.)  eta = 1 / beta, and w wins for certain.  In nats squared.
    """
    chosen_P, rejected_P = ratio_rewards(x, cfg)
    loss_P = ((chosen_P - 0.5) / cfg.beta).square() + ((rejected_P + 0.5) / cfg.beta).square()
    return PreferenceTerms.of(loss_P, chosen_P, rejected_P)


def apo_zero(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """(1 - sigmoid(r_w)) + sigmoid(r_l)   (APO, D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7).

    Raises the chosen answer and lowers the rejected one, each by itself: for data better than the policy.  Starts at 1.
    """
    chosen_P, rejected_P = ratio_rewards(x, cfg)
    return PreferenceTerms.of(torch.sigmoid(-chosen_P) + torch.sigmoid(rejected_P), chosen_P, rejected_P)


def apo_down(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """sigmoid(r_w) + (1 - sigmoid(r_w - r_l))   (APO, eq. 8).

    Lowers the chosen answer and the rejected one more: for a policy that is better than the data.  Starts at 1.
    """
    chosen_P, rejected_P = ratio_rewards(x, cfg)
    return PreferenceTerms.of(torch.sigmoid(chosen_P) + torch.sigmoid(rejected_P - chosen_P), chosen_P, rejected_P)
