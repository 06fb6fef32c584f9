"""What every policy loss does with its arguments first.   Shapes: B sequences, T response tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tutelage.errors import ConfigError
from tutelage.math.kl import clamped_log_ratio
from tutelage.math.masking import masked_values, require_matrix, require_same_shape
from tutelage.math.policy_loss import LOG_RATIO_CLAMP


class Inputs(NamedTuple):
    """All (B, T), 0 under mask 0, float32 at least; only `logp` and `log_ratio` have a gradient.

    log_ratio: log pi - log pi_old, within +-20.   real: bool, where the mask is not 0.
    """

    logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    real: Tensor
    log_ratio: Tensor


def inputs_of(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Inputs:
    """Raises ShapeError unless all are (B, T)."""
    require_matrix(logp=logp_BT)
    require_same_shape(logp=logp_BT, old_logp=old_logp_BT, advantage=advantage_BT, mask=mask_BT)
    logp, old_logp = masked_values(logp_BT, mask_BT), masked_values(old_logp_BT.detach(), mask_BT)
    advantage = masked_values(advantage_BT.detach(), mask_BT)
    return Inputs(logp, old_logp, advantage, mask_BT != 0, clamped_log_ratio(logp, old_logp, LOG_RATIO_CLAMP))


def row_mean(x_BT: Tensor, real_BT: Tensor) -> Tensor:
    """(B, 1) mean over the tokens of each row that count; 0 where none does.  x is 0 under the mask."""
    return x_BT.sum(dim=1, keepdim=True) / real_BT.sum(dim=1, keepdim=True).clamp(min=1)


def require_above(**values: float) -> None:
    """Raise ConfigError unless every value is above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value}", fix="use a number above 0")


def require_at_least(bound: float, **values: float) -> None:
    """Raise ConfigError unless every value is `bound` or more."""
    for name, value in values.items():
        if not value >= bound:
            raise ConfigError(f"{name} is {value}", fix=f"use a number >= {bound:g}")
