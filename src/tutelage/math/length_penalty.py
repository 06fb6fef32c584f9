"""A penalty on responses that come near their length limit.   Shapes: B sequences."""

from __future__ import annotations

from torch import Tensor, float32

from tutelage.errors import ConfigError


def soft_overlong_penalty(tokens_B: Tensor, limit: int, buffer: int, factor: float = 1.0) -> Tensor:
    """The penalty of a response of n tokens   (DAPO, Yu et al. 2025, 2503.14476, eq. 13, times factor):

        0                            n <= limit - buffer
        (limit - buffer - n) / buffer    limit - buffer < n <= limit
        -1                           limit < n

    tokens_B: (B,) tokens that the policy produced.  limit, buffer: tokens, 1 <= buffer <= limit.  factor >= 0: what a
    response at the limit loses.  Returns (B,) float32, never above 0, to be added to the score.
    Raises ConfigError for numbers out of range.
    """
    if not 1 <= buffer <= limit:
        raise ConfigError(
            f"the overlong buffer is {buffer} tokens and the length limit {limit}",
            fix=f"use a buffer from 1 to {limit}",
        )
    if not factor >= 0:
        raise ConfigError(f"the factor of the overlong penalty is {factor}", fix="use a number of at least 0")
    over_B = (tokens_B.to(float32) - (limit - buffer)) / buffer
    return 0.0 - factor * over_B.clamp(min=0.0, max=1.0)
