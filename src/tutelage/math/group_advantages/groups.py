"""A response against the other responses to the same prompt: statistics of groups, and GRPO's advantage.

Shapes: B sequences, in groups named by an integer each; G responses in a group.  Float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.errors import ConfigError, RewardError, ShapeError, closest
from tutelage.math.masking import at_least_float32, require_same_shape

SCALES: tuple[str, ...] = ("group", "batch")


@dataclass(frozen=True)
class Groups:
    """mean, size, std of the group of each sequence (std: sample standard deviation, denominator G - 1, 0 for G = 1);
    equal: all scores of the group are the same.  All (B,).
    """

    mean: Tensor
    size: Tensor
    std: Tensor
    equal: Tensor


def group_statistics(score_B: Tensor, group_B: Tensor) -> Groups:
    """Statistics of the group of each sequence; groups are named by integers, in any order.  Raises ShapeError."""
    require_same_shape(score=score_B, group=group_B)
    if score_B.dim() != 1:
        raise ShapeError(f"scores have shape {tuple(score_B.shape)}", fix="pass one score per sequence")
    score_B = at_least_float32(score_B)
    names_g, inverse_B = torch.unique(group_B, return_inverse=True)
    size_g = torch.bincount(inverse_B, minlength=len(names_g))
    empty_g = score_B.new_zeros(len(names_g))
    mean_B = (empty_g.index_add(0, inverse_B, score_B) / size_g)[inverse_B]
    square_g = empty_g.index_add(0, inverse_B, (score_B - mean_B).square())
    largest_g = empty_g.scatter_reduce(0, inverse_B, score_B, "amax", include_self=False)
    smallest_g = empty_g.scatter_reduce(0, inverse_B, score_B, "amin", include_self=False)
    std_g = (square_g / (size_g - 1).clamp(min=1)).sqrt()
    return Groups(mean_B, size_g[inverse_B], std_g[inverse_B], (largest_g == smallest_g)[inverse_B])


def group_advantages(score_B: Tensor, group_B: Tensor, scale: str, eps: float) -> Tensor:
    """A_i = (r_i - mean r) / (std r + eps), mean over the group of i    (GRPO, Shao et al. 2024, section 4.1.2).

        scale = group   std over the group of i, the sample standard deviation (denominator G - 1)
        scale = batch   std over all B scores (denominator B - 1), one for all groups (Liu et al. 2025, 2508.08221)

    The second keeps a group's weight in proportion to how much its rewards differ.  eps is added to the standard
    deviation, not to the variance.

    score_B: (B,), finite; group_B: (B,) integers, equal within a group, in any order.  Returns (B,), no gradient.
    A group of one, and a group whose scores are all equal, has A = 0 exactly.
    Raises ShapeError, ConfigError for the scale or eps, and RewardError for scores that are not finite.
    """
    if scale not in SCALES:
        raise ConfigError(
            f"{scale!r} is not a scale of group advantages.{closest(scale, SCALES)}",
            fix=f"choose one of {', '.join(SCALES)}",
        )
    if not eps > 0.0:
        raise ConfigError(f"eps of the group advantages is {eps}", fix="use a number above 0; 1e-4 is usual")
    score_B = at_least_float32(score_B.detach())
    if not bool(torch.isfinite(score_B).all()):
        bad = int((~torch.isfinite(score_B)).sum())
        raise RewardError(f"{bad} of {len(score_B)} scores are NaN or infinite", fix="look at the reward function")
    groups = group_statistics(score_B, group_B)
    std_B = groups.std
    if scale == "batch":
        std_B = (score_B.std() if len(score_B) > 1 else score_B.new_zeros(())).expand_as(score_B)
    return ((score_B - groups.mean) / (std_B + eps)).masked_fill(groups.equal, 0.0)
