"""Generalised advantage estimation and whitening, over masks with holes.

Shapes: B sequences, T response tokens. Values under mask 0 are never read; outputs there are 0. Float32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.masking import (
    at_least_float32,
    masked_mean,
    masked_values,
    masked_var,
    require_matrix,
    require_same_shape,
)


def gae(
    reward_BT: Tensor,
    value_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lam: float,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens the policy produced.

        delta_t = r_t + gamma V_t' - V_t,    A_t = delta_t + gamma lam A_t'    (Schulman et al. 2016, eq. 16)

    where t' is the next token with mask 1: a masked token (tool output) is no step of the policy, takes no discount and
    passes value and advantage through. After the last such token A is 0, and V is bootstrap_B: the critic's value of
    the state that follows, for responses cut off by the length limit; 0 (None) for responses that ended.

    reward_BT, value_BT, mask_BT: (B, T); bootstrap_B: (B,). gamma, lam in [0, 1].
    Returns advantage_BT and return_BT = A + V (the critic's target), both 0 where mask is 0. Not whitened.
    Raises ShapeError when shapes differ, ConfigError for gamma or lam outside [0, 1].
    """
    require_matrix(reward=reward_BT)
    require_same_shape(reward=reward_BT, value=value_BT, mask=mask_BT)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ConfigError(f"{name} is {number}", fix="use a number in [0, 1]")
    if bootstrap_B is not None and bootstrap_B.shape != reward_BT.shape[:1]:
        raise ShapeError(
            f"bootstrap {tuple(bootstrap_B.shape)} does not fit reward {tuple(reward_BT.shape)}",
            fix="pass one value per sequence",
        )
    reward_BT, value_BT = masked_values(reward_BT, mask_BT), masked_values(value_BT, mask_BT)
    real_BT = mask_BT != 0
    next_value_B = value_BT.new_zeros(len(value_BT)) if bootstrap_B is None else at_least_float32(bootstrap_B)
    next_advantage_B = torch.zeros_like(next_value_B)
    advantage_BT = torch.zeros_like(reward_BT + value_BT)
    columns: list[Tensor] = []
    for t in reversed(range(reward_BT.shape[1])):
        real_B, value_B = real_BT[:, t], value_BT[:, t]
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_B
        advantage_B = delta_B + gamma * lam * next_advantage_B
        columns.append(advantage_B.masked_fill(~real_B, 0.0))
        next_value_B = torch.where(real_B, value_B, next_value_B)
        next_advantage_B = torch.where(real_B, advantage_B, next_advantage_B)
    if columns:
        advantage_BT = torch.stack(columns[::-1], dim=1)
    return advantage_BT, advantage_BT + value_BT


def whiten(x_BT: Tensor, mask_BT: Tensor, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps), plus the mean again unless shift_mean; 0 where mask is 0.

    Mean and *sample* variance (denominator N - 1) over all N tokens with mask 1: pass the whole global rollout batch,
    once, before it is cut into mini-batches, else the result depends on the cut.

    Advantages are whitened with the shift. Rewards, where they are whitened, are so *without* it (Huang et al. 2024,
    arXiv:2403.17031): (r - mean) / std + mean sets their spread to 1 and leaves their mean where it was, since moving
    the mean of per-token rewards would pay or charge every token and thereby the length of the response.

    One token or equal values: var is 0, and the result is 0 (with the shift) or x (without).
    Any shape. Raises ShapeError.
    """
    mean = masked_mean(x_BT, mask_BT)
    white_BT = (masked_values(x_BT, mask_BT) - mean) * torch.rsqrt(masked_var(x_BT, mask_BT) + eps)
    return masked_values(white_BT if shift_mean else white_BT + mean, mask_BT)
