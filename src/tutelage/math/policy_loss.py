"""What a policy loss says of every token, and the clipped surrogate loss of PPO, any shape.  More: policy_losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.errors import ConfigError
from tutelage.math.kl import clamped_log_ratio, kl_k3
from tutelage.math.masking import at_least_float32, require_same_shape

LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True)
class PolicyTerms:
    """What one item contributes; all of the inputs' shape. Only `loss` carries gradient.

    loss: to be weighted and summed.  ratio: pi / pi_old, of what the loss compares: the token or its sequence.
    clipped: the loss holds the item back: its gradient is 0, or, in cispo, its weight was cut.
    dual_clipped: the dual clip is active, so the gradient is 0 (never together with `clipped`).
    approx_kl: k3 estimate of KL(pi_old || pi), for items drawn from pi_old; nats.
    selected: tokens that were picked by their covariance; None where none are.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    approx_kl: Tensor
    selected: Tensor | None = None


def policy_terms(
    loss: Tensor,
    logp: Tensor,
    old_logp: Tensor,
    *,
    ratio: Tensor | None = None,
    clipped: Tensor | None = None,
    selected: Tensor | None = None,
) -> PolicyTerms:
    """The terms of a loss: pi / pi_old is that of the item unless `ratio` is given, nothing is clipped unless said.

    All of one shape, which is checked (ShapeError).
    """
    require_same_shape(loss=loss, logp=logp, old_logp=old_logp, ratio=ratio, clipped=clipped, selected=selected)
    logp, old_logp = logp.detach(), old_logp.detach()
    if ratio is None:
        ratio = clamped_log_ratio(logp, old_logp, LOG_RATIO_CLAMP).exp()
    free = torch.zeros_like(loss, dtype=torch.bool)
    return PolicyTerms(
        loss=loss,
        ratio=ratio.detach(),
        clipped=free if clipped is None else clipped.detach(),
        dual_clipped=free,
        approx_kl=kl_k3(old_logp, logp, LOG_RATIO_CLAMP),
        selected=selected,
    )


def ppo_policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - old_logp)   (Schulman et al. 2017, eq. 7).

    Minimised, so the sign is turned. Unequal clip_low and clip_high are "clip higher" (DAPO, Yu et al. 2025). With
    dual_clip = c > 1 the loss of an item with A < 0 is at most -c A (Ye et al. 2020). The log ratio is clamped to +-20
    before the exponential. old_logp and advantage get no gradient.

    Elementwise on any shape. Raises ShapeError when shapes differ, ConfigError unless 0 <= clip_low <= 1,
    clip_high >= 0 and dual_clip > 1.
    """
    require_same_shape(logp=logp, old_logp=old_logp, advantage=advantage)
    if not 0.0 <= clip_low <= 1.0:
        raise ConfigError(f"lower clip range is {clip_low}", fix="use a number in [0, 1]; 0.2 is usual")
    if not clip_high >= 0.0:
        raise ConfigError(f"upper clip range is {clip_high}", fix="use a number >= 0; 0.2 is usual")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ConfigError(f"dual_clip is {dual_clip}", fix="use a number above 1 (3 is usual), or none")
    old_logp, advantage = old_logp.detach(), at_least_float32(advantage.detach())
    ratio = clamped_log_ratio(logp, old_logp, LOG_RATIO_CLAMP).exp()
    free = -advantage * ratio
    held = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, held)
    clipped = (held > free).detach()
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        bound = -dual_clip * advantage
        dual_clipped = ((advantage < 0) & (loss > bound)).detach()
        loss = torch.where(dual_clipped, bound, loss)
    return PolicyTerms(
        loss=loss,
        ratio=ratio.detach(),
        clipped=clipped,
        dual_clipped=dual_clipped,
        approx_kl=kl_k3(old_logp, logp.detach(), LOG_RATIO_CLAMP),
    )
