"""Losses of the gap between two scores: what DPO's sigmoid is one of.   Shapes: P pairs.

s is the score of an answer: log pi / ref, or what an f-divergence makes of it (`divergences.scores`).
z = beta (s_w - s_l) is the gap in units of the reward, w the chosen answer, l the rejected one.
All are (P,) and not averaged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tutelage.errors import ConfigError
from tutelage.math.preference.divergences import scores
from tutelage.math.preference.inputs import PreferenceInputs, PreferenceSettings, PreferenceTerms


def smoothed_logistic(gap_P: Tensor, smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(z) - e log sigmoid(-z), e the chance that a label is wrong.

    Least at z = log((1 - e) / e).
    """
    loss_P = -logsigmoid(gap_P)
    if smoothing > 0.0:
        loss_P = (1.0 - smoothing) * loss_P - smoothing * logsigmoid(-gap_P)
    return loss_P


def rewards(x: PreferenceInputs, cfg: PreferenceSettings) -> tuple[Tensor, Tensor]:
    """(chosen_P, rejected_P): beta times the scores."""
    chosen_P, rejected_P = scores(x, cfg)
    return cfg.beta * chosen_P, cfg.beta * rejected_P


def normalised_rewards(x: PreferenceInputs, cfg: PreferenceSettings) -> tuple[Tensor, Tensor]:
    """(chosen_P, rejected_P): beta times the scores per trained token."""
    chosen_P, rejected_P = rewards(x, cfg)
    return chosen_P / x.chosen_len, rejected_P / x.rejected_len


def sigmoid(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-log sigmoid(z)   (DPO, Rafailov et al. 2023, eq. 7); with label smoothing cDPO (Mitchell 2023).

    log 2 where pi = ref, whatever the smoothing.
    """
    chosen_P, rejected_P = rewards(x, cfg)
    return PreferenceTerms.of(smoothed_logistic(chosen_P - rejected_P, cfg.label_smoothing), chosen_P, rejected_P)


def sigmoid_norm(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-log sigmoid(beta (s_w / |y_w| - s_l / |y_l|)): the sigmoid of scores per token (Lambert et al. 2024, Tulu 3)."""
    chosen_P, rejected_P = normalised_rewards(x, cfg)
    return PreferenceTerms.of(smoothed_logistic(chosen_P - rejected_P, cfg.label_smoothing), chosen_P, rejected_P)


def robust(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """(-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e)   (Chowdhury et al. 2024, arXiv:2403.00409).

    In expectation over labels of which a share e is flipped it is the loss on clean ones.  e is `label_smoothing`.
    """
    chosen_P, rejected_P = rewards(x, cfg)
    gap_P, flipped = chosen_P - rejected_P, cfg.label_smoothing
    loss_P = (-(1.0 - flipped) * logsigmoid(gap_P) + flipped * logsigmoid(-gap_P)) / (1.0 - 2.0 * flipped)
    return PreferenceTerms.of(loss_P, chosen_P, rejected_P)


def hinge(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """max(0, 1 - z)   (SLiC, Zhao et al. 2023, arXiv:2305.10425, on DPO's rewards: RSO, Liu et al. 2024)."""
    chosen_P, rejected_P = rewards(x, cfg)
    return PreferenceTerms.of(torch.relu(1.0 - (chosen_P - rejected_P)), chosen_P, rejected_P)


def ipo_sum(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """(s_w - s_l - 1 / (2 beta))^2   (IPO, Azar et al. 2024, arXiv:2310.12036, eq. 17, beta its tau).

    Scores of whole answers, as the paper's equation has them; in nats squared.
    """
    chosen_P, rejected_P = rewards(x, cfg)
    loss_P = ((chosen_P - rejected_P) / cfg.beta - 0.5 / cfg.beta).square()
    return PreferenceTerms.of(loss_P, chosen_P, rejected_P)


def ipo(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """(s_w / |y_w| - s_l / |y_l| - 1 / (2 beta))^2: IPO with scores per token, as its authors ran it."""
    chosen_P, rejected_P = normalised_rewards(x, cfg)
    loss_P = ((chosen_P - rejected_P) / cfg.beta - 0.5 / cfg.beta).square()
    return PreferenceTerms.of(loss_P, chosen_P, rejected_P)


def exo_pair(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """KL(q || p), q = (sigmoid(z), sigmoid(-z)), p = (1 - e, e)   (EXO, Ji et al. 2024, arXiv:2402.00856, eq. 16).

    The reverse of cDPO's divergence: it seeks a mode.  Raises ConfigError where e, `label_smoothing`, is 0.
    """
    if cfg.label_smoothing == 0.0:
        raise ConfigError("exo_pair with label_smoothing 0 is infinite", fix="set it above 0; 1e-3 is the paper's")
    chosen_P, rejected_P = rewards(x, cfg)
    log_q_P, log_not_q_P = logsigmoid(chosen_P - rejected_P), logsigmoid(rejected_P - chosen_P)
    log_p, log_not_p = math.log1p(-cfg.label_smoothing), math.log(cfg.label_smoothing)
    loss_P = log_q_P.exp() * (log_q_P - log_p) + log_not_q_P.exp() * (log_not_q_P - log_not_p)
    return PreferenceTerms.of(loss_P, chosen_P, rejected_P)


def discopop(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """(1 - m) (-log sigmoid(z)) + m exp(-z), m = sigmoid(z / tau).

    (DiscoPOP, Lu et al. 2024, arXiv:2406.08414, eq. 5.)

    The log-ratio modulated loss: logistic where the pair is wrong, exponential where it is right.  Not convex.
    """
    chosen_P, rejected_P = rewards(x, cfg)
    gap_P = chosen_P - rejected_P
    exponential_P = torch.exp(logsigmoid(gap_P / cfg.tau) - gap_P)
    loss_P = torch.sigmoid(-gap_P / cfg.tau) * -logsigmoid(gap_P) + exponential_P
    return PreferenceTerms.of(loss_P, chosen_P, rejected_P)
