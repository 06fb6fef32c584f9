"""Losses and accuracy of a reward model on preference pairs, and one score from several models.

Shapes: P pairs, M members of an ensemble, B answers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tutelage.errors import ConfigError, ShapeError, closest
from tutelage.math.masking import at_least_float32, require_same_shape

ENSEMBLE_COMBINATIONS: tuple[str, ...] = ("mean", "min", "variance_penalised")


def bradley_terry_loss(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None = None, centring: float = 0.0
) -> Tensor:
    """loss_P = -log sigmoid(c - r - margin) + centring * (c + r)^2, c the score of the chosen, r of the rejected.

    The first term is the negative log-likelihood under Bradley and Terry (1952) (Ouyang et al. 2022, eq. 1), in nats;
    the margin asks for a larger gap on clearer preferences (Touvron et al. 2023, eq. 2). Only differences are
    identified, so the second term holds the scores around 0 (Eisenstein et al. 2023; 0.01 is usual).

    (P,) each; elementwise, not averaged. Raises ShapeError when shapes differ, ConfigError for a centring below 0.
    """
    require_same_shape(chosen=chosen_P, rejected=rejected_P, margin=margin_P)
    chosen_P, rejected_P = at_least_float32(chosen_P), at_least_float32(rejected_P)
    gap_P = chosen_P - rejected_P if margin_P is None else chosen_P - rejected_P - at_least_float32(margin_P)
    return _centred(-logsigmoid(gap_P), chosen_P, rejected_P, centring)


def scaled_bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, centring: float = 0.0) -> Tensor:
    """loss_P = -margin log sigmoid(c - r) + centring * (c + r)^2, c the score of the chosen, r of the rejected.

    A clear preference weighs more, as if it had been seen `margin` times (Wang et al. 2024, HelpSteer2-Preference,
    arXiv:2410.01257); the gap it asks for is that of Bradley and Terry. The centring term is not scaled.

    (P,) each; elementwise, not averaged. Raises ShapeError when shapes differ, ConfigError for a centring below 0.
    """
    require_same_shape(chosen=chosen_P, rejected=rejected_P, margin=margin_P)
    chosen_P, rejected_P = at_least_float32(chosen_P), at_least_float32(rejected_P)
    return _centred(-margin_P.to(chosen_P) * logsigmoid(chosen_P - rejected_P), chosen_P, rejected_P, centring)


def _centred(loss_P: Tensor, chosen_P: Tensor, rejected_P: Tensor, centring: float) -> Tensor:
    if not centring >= 0.0:
        raise ConfigError(f"reward centring coefficient is {centring}", fix="use a number >= 0; 0.01 is usual")
    return loss_P + centring * (chosen_P + rejected_P).square() if centring > 0.0 else loss_P


def combined_scores(score_MB: Tensor, kind: str, variance_weight: float = 0.0) -> tuple[Tensor, Tensor]:
    """(B,) the score of an ensemble, and (B,) how far its members disagree: their standard deviation.

        mean                 (1 / M) sum_m s_m
        min                  min_m s_m                              worst-case optimisation
        variance_penalised   mean - variance_weight (1 / M) sum_m (s_m - mean)^2    uncertainty-weighted optimisation

    (Coste et al. 2024, arXiv:2310.02743, section 3.2.) The deviation has the denominator M, in the score's own units.
    Raises ConfigError for an unknown kind or a weight below 0, ShapeError unless the scores are (M, B) with M >= 1.
    """
    if kind not in ENSEMBLE_COMBINATIONS:
        raise ConfigError(
            f"{kind!r} does not combine reward models.{closest(kind, ENSEMBLE_COMBINATIONS)}",
            fix=f"choose one of {', '.join(ENSEMBLE_COMBINATIONS)}",
        )
    if not variance_weight >= 0.0:
        raise ConfigError(f"variance_weight is {variance_weight}", fix="use a number >= 0; 0.1 is usual")
    if score_MB.dim() != 2 or not len(score_MB):
        raise ShapeError(f"scores of an ensemble have shape {tuple(score_MB.shape)}", fix="give (members, answers)")
    score_MB = at_least_float32(score_MB)
    mean_B, variance_B = score_MB.mean(dim=0), score_MB.var(dim=0, correction=0)
    found_B = {"mean": mean_B, "min": score_MB.amin(dim=0), "variance_penalised": mean_B - variance_weight * variance_B}
    return found_B[kind], variance_B.sqrt()


def pair_accuracy(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """correct_P: 1.0 where chosen > rejected, 0.5 where equal, 0.0 where below, NaN where either score is NaN.

    Elementwise float tensor: its mean is the accuracy, with ties counted as half, so a constant model has 0.5.
    Carries no gradient. Raises ShapeError.
    """
    require_same_shape(chosen=chosen_P, rejected=rejected_P)
    chosen_P, rejected_P = at_least_float32(chosen_P.detach()), at_least_float32(rejected_P.detach())
    correct_P = (chosen_P > rejected_P).to(chosen_P.dtype) + 0.5 * (chosen_P == rejected_P).to(chosen_P.dtype)
    return correct_P.masked_fill(torch.isnan(chosen_P) | torch.isnan(rejected_P), float("nan"))
