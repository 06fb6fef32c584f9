"""Scores of f-DPO: the derivative of a divergence at the probability ratio (Wang et al. 2023, arXiv:2309.16240).

The policy that maximises E[r] - beta D_f(pi || ref) has r(x, y) = beta f'(pi / ref) + c(x).  In the difference of two
answers to one prompt c cancels, so f' takes the place of the log ratio in any loss of that difference.
Shapes: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tutelage.errors import ConfigError, closest
from tutelage.math.preference.inputs import PreferenceInputs, PreferenceSettings

LARGEST_EXPONENT = 80.0
"""e^80 is near the end of float32; past it a score stays where it is, and its gradient is 0 (`score_limits`)."""


def reverse_kl(log_ratio_P: Tensor, alpha: float) -> Tensor:
    """f(u) = u log u: f'(u) = log u + 1; the constant is left out.  DPO's own."""
    return log_ratio_P


def forward_kl(log_ratio_P: Tensor, alpha: float) -> Tensor:
    """f(u) = -log u: f'(u) = -1 / u; 1 is added, so that the score is 0 at u = 1."""
    return 1.0 - torch.exp((-log_ratio_P).clamp(max=LARGEST_EXPONENT))


def js_divergence(log_ratio_P: Tensor, alpha: float) -> Tensor:
    """f(u) = u log u - (u + 1) log((u + 1) / 2): f'(u) = log(2 u / (1 + u)), at most log 2."""
    return math.log(2.0) + logsigmoid(log_ratio_P)


def alpha_divergence(log_ratio_P: Tensor, alpha: float) -> Tensor:
    """f(u) = (u^(1 - a) - (1 - a) u - a) / (a (a - 1)), 0 < a < 1: f'(u) = (1 - u^-a) / a.

    Towards a = 0 it is reverse_kl's, at a = 1 forward_kl's.
    """
    return -torch.expm1((-alpha * log_ratio_P).clamp(max=LARGEST_EXPONENT)) / alpha


DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}


def scores(x: PreferenceInputs, cfg: PreferenceSettings) -> tuple[Tensor, Tensor]:
    """(chosen_P, rejected_P): f'(pi / ref) of both answers; the log ratios under reverse_kl.

    Raises ConfigError for an unknown divergence.
    """
    if cfg.divergence not in DIVERGENCES:
        raise ConfigError(
            f"{cfg.divergence!r} is not a divergence.{closest(cfg.divergence, DIVERGENCES)}",
            fix=f"choose one of {', '.join(DIVERGENCES)}",
        )
    score = DIVERGENCES[cfg.divergence]
    return score(x.log_ratio_chosen, cfg.divergence_alpha), score(x.log_ratio_rejected, cfg.divergence_alpha)


def score_limits(x: PreferenceInputs, cfg: PreferenceSettings) -> Tensor:
    """(P,) bool: a score of the pair is past LARGEST_EXPONENT, where it gives no gradient."""
    factor = {"forward_kl": 1.0, "alpha_divergence": cfg.divergence_alpha}.get(cfg.divergence, 0.0)
    least_P = torch.minimum(x.log_ratio_chosen, x.log_ratio_rejected).detach()
    return -factor * least_P > LARGEST_EXPONENT
