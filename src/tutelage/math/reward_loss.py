"""Losses and accuracy of a reward model on preference pairs. Shapes: P pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tutelage.errors import ConfigError
from tutelage.math.masking import at_least_float32, require_same_shape


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
    if not centring >= 0.0:
        raise ConfigError(f"reward centring coefficient is {centring}", fix="use a number >= 0; 0.01 is usual")
    chosen_P, rejected_P = at_least_float32(chosen_P), at_least_float32(rejected_P)
    gap_P = chosen_P - rejected_P if margin_P is None else chosen_P - rejected_P - at_least_float32(margin_P)
    loss_P = -logsigmoid(gap_P)
    return loss_P + centring * (chosen_P + rejected_P).square() if centring > 0.0 else loss_P


def pair_accuracy(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """correct_P: 1.0 where chosen > rejected, 0.5 where equal, 0.0 where below, NaN where either score is NaN.

    Elementwise float tensor: its mean is the accuracy, with ties counted as half, so a constant model has 0.5.
    Carries no gradient. Raises ShapeError.
    """
    require_same_shape(chosen=chosen_P, rejected=rejected_P)
    chosen_P, rejected_P = at_least_float32(chosen_P.detach()), at_least_float32(rejected_P.detach())
    correct_P = (chosen_P > rejected_P).to(chosen_P.dtype) + 0.5 * (chosen_P == rejected_P).to(chosen_P.dtype)
    return correct_P.masked_fill(torch.isnan(chosen_P) | torch.isnan(rejected_P), float("nan"))
