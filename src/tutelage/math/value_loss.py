"""The critic's clipped squared error, per token, any shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.errors import ConfigError
from tutelage.math.masking import at_least_float32, require_same_shape


@dataclass(frozen=True)
class ValueTerms:
    """loss carries gradient. clipped: the clipped branch is the active one, so the gradient is 0."""

    loss: Tensor
    clipped: Tensor


def clipped_value_loss(value: Tensor, old_value: Tensor, ret: Tensor, clip: float | None) -> ValueTerms:
    """1/2 max((v - R)^2, (v_clip - R)^2), v_clip = v_old + clip(v - v_old, -c, c); 1/2 (v - R)^2 with clip None.

    (The PPO2 implementation of OpenAI baselines, 2017; the factor 1/2 is part of it.) In squared units of the return.
    old_value and ret get no gradient. Elementwise on any shape. Raises ShapeError; ConfigError unless clip > 0.
    """
    require_same_shape(value=value, old_value=old_value, ret=ret)
    if clip is not None and not clip > 0.0:
        raise ConfigError(f"value clip range is {clip}", fix="use a number above 0 (0.2 is usual), or none")
    value, old_value, ret = (at_least_float32(x) for x in (value, old_value.detach(), ret.detach()))
    free = (value - ret).square()
    if clip is None:
        return ValueTerms(loss=0.5 * free, clipped=torch.zeros_like(free, dtype=torch.bool))
    held = (old_value + (value - old_value).clamp(-clip, clip) - ret).square()
    return ValueTerms(loss=0.5 * torch.maximum(free, held), clipped=(held > free).detach())
