"""Importance weights between the sampler's and the trainer's logprobs of the same tokens, and how far these differ.

Shapes: B sequences, T response tokens.  Values under mask 0 are never read; weights there are 0.  Float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.errors import ConfigError, closest
from tutelage.math.kl import clamped_log_ratio, kl_k3
from tutelage.math.masking import masked_values, require_matrix, require_same_shape

LOG_RATIO_CLAMP = 20.0
CORRECTIONS: tuple[str, ...] = ("token_truncated", "sequence_truncated", "token_masked", "sequence_masked")


@dataclass(frozen=True)
class Importance:
    """All (B, T), without gradient, 0 (False) where the mask is 0.

    weight: factor on the policy loss of a token.  ratio: before the cap.  capped: tokens whose ratio is above the cap.
    mismatch_kl: k3 estimate of KL(sampler || trainer), for tokens drawn from the sampler; nats per token.
    """

    weight: Tensor
    ratio: Tensor
    capped: Tensor
    mismatch_kl: Tensor


def importance_weights(
    old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor, kind: str, cap: float
) -> Importance:
    """rho = pi_trainer / pi_sampler, which turns an expectation over the sampler's tokens into one over the trainer's.

        token     rho_t = exp(old_t - rollout_t)
        sequence  rho_t = exp(sum_s (old_s - rollout_s)), the same for every token s of the response with mask 1
        truncated weight = min(rho, cap)                (IMPALA, Espeholt et al. 2018; TIS, Yao et al. 2025)
        masked    weight = rho where rho <= cap, else 0 (masked importance sampling, Liu et al. 2025)

    The sequence form is unbiased below the cap; the token form leaves the prefix uncorrected, with much less variance.
    Truncation biases towards the sampler and keeps every token; masking drops what the trainer finds far more likely.
    Log ratios are clamped to +-20, those of a sequence after the sum.

    old_logp_BT, rollout_logp_BT, mask_BT: (B, T); cap >= 1.  Raises ShapeError, ConfigError for the kind or the cap.
    """
    require_matrix(old_logp=old_logp_BT)
    require_same_shape(old_logp=old_logp_BT, rollout_logp=rollout_logp_BT, mask=mask_BT)
    if kind not in CORRECTIONS:
        raise ConfigError(
            f"{kind!r} is not an importance correction.{closest(kind, CORRECTIONS)}",
            fix=f"choose one of {', '.join(CORRECTIONS)}",
        )
    if not cap >= 1.0:
        raise ConfigError(f"the importance cap is {cap}", fix="use a number >= 1; 2 is usual")
    old_BT, rollout_BT = masked_values(old_logp_BT.detach(), mask_BT), masked_values(rollout_logp_BT.detach(), mask_BT)
    level, _, treatment = kind.partition("_")
    log_ratio_BT = old_BT - rollout_BT
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)
    real_BT = mask_BT != 0
    ratio_BT = clamped_log_ratio(log_ratio_BT, torch.zeros_like(log_ratio_BT), LOG_RATIO_CLAMP).exp() * real_BT
    capped_BT = ratio_BT > cap
    weight_BT = ratio_BT.clamp(max=cap) if treatment == "truncated" else ratio_BT.masked_fill(capped_BT, 0.0)
    return Importance(weight_BT, ratio_BT, capped_BT, kl_k3(rollout_BT, old_BT, LOG_RATIO_CLAMP) * real_BT)
