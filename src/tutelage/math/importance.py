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
CORRECTIONS: tuple[str, ...] = (
    "token_truncated",
    "sequence_truncated",
    "geometric_truncated",
    "token_masked",
    "sequence_masked",
    "geometric_masked",
)


@dataclass(frozen=True)
class Importance:
    """All (B, T), without gradient, 0 (False) where the mask is 0.

    weight: factor on the policy loss of a token.  ratio: before the bounds.
    capped: tokens whose ratio is above the cap.  floored: below the floor.  vetoed: of rows with an extreme token.
    mismatch_kl: k3 estimate of KL(sampler || trainer), for tokens drawn from the sampler; nats per token.
    """

    weight: Tensor
    ratio: Tensor
    capped: Tensor
    floored: Tensor
    vetoed: Tensor
    mismatch_kl: Tensor


def importance_weights(
    old_logp_BT: Tensor,
    rollout_logp_BT: Tensor,
    mask_BT: Tensor,
    kind: str,
    cap: float,
    *,
    floor: float | None = None,
    normalize: bool = False,
    veto: float | None = None,
) -> Importance:
    """rho = pi_trainer / pi_sampler, which turns an expectation over the sampler's tokens into one over the trainer's.

        token      rho_t = exp(old_t - rollout_t)
        sequence   rho_t = exp(sum_s (old_s - rollout_s)), the same for every token s of the response with mask 1
        geometric  rho_t = exp(mean_s (old_s - rollout_s)), likewise
        truncated  weight = min(rho, cap), and max(., floor)   (IMPALA, Espeholt et al. 2018; TIS, Yao et al. 2025)
        masked     weight = rho where floor <= rho <= cap, else 0   (MIS, Liu et al. 2025; two-sided: IcePop)
        none       weight = 1

    The sequence form is unbiased below the cap; the token form leaves the prefix uncorrected, with much less variance.
    The geometric form is no importance weight but a length-free measure of how far a response is off: for masks.
    Truncation biases towards the sampler and keeps every token; masking drops what the trainer finds far more likely.

    normalize: then divided by the mean weight, over all tokens (token) or all rows with tokens (else), weights of 0
    included; self-normalised importance sampling, less variance for a bias that falls with the batch.
    veto: then 0 in rows where some token's exp(old_t - rollout_t) < veto, whatever the level; others keep theirs.
    Rows and tokens of weight 0 stay in every denominator.  Log ratios are clamped to +-20, of a row after the sum.

    old_logp_BT, rollout_logp_BT, mask_BT: (B, T).  Raises ShapeError; ConfigError for the kind, and unless cap >= 1,
    0 < floor <= 1 and 0 < veto < 1.
    """
    require_matrix(old_logp=old_logp_BT)
    require_same_shape(old_logp=old_logp_BT, rollout_logp=rollout_logp_BT, mask=mask_BT)
    _require_settings(kind, cap, floor, veto)
    old_BT, rollout_BT = masked_values(old_logp_BT.detach(), mask_BT), masked_values(rollout_logp_BT.detach(), mask_BT)
    level, _, treatment = kind.partition("_")
    real_BT = mask_BT != 0
    log_ratio_BT = old_BT - rollout_BT
    token_ratio_BT = _ratio(log_ratio_BT)
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)
    if level == "geometric":
        log_ratio_BT = _row_mean(log_ratio_BT, real_BT).expand_as(log_ratio_BT)
    ratio_BT = _ratio(log_ratio_BT) * real_BT
    capped_BT = ratio_BT > cap
    floored_BT = (ratio_BT < floor) & real_BT if floor is not None else torch.zeros_like(real_BT)
    if kind == "none":
        weight_BT, capped_BT = real_BT.to(ratio_BT), torch.zeros_like(real_BT)
    elif treatment == "truncated":
        weight_BT = ratio_BT.clamp(max=cap) if floor is None else ratio_BT.clamp(floor, cap) * real_BT
    else:
        weight_BT = ratio_BT.masked_fill(capped_BT | floored_BT, 0.0)
    if normalize:
        weight_BT = weight_BT / _mean_weight(weight_BT, real_BT, by_row=level != "token")
    vetoed_BT = torch.zeros_like(real_BT)
    if veto is not None:
        vetoed_BT = ((token_ratio_BT < veto) & real_BT).any(dim=1, keepdim=True) & real_BT
    return Importance(
        weight=weight_BT.masked_fill(vetoed_BT, 0.0),
        ratio=ratio_BT,
        capped=capped_BT,
        floored=floored_BT,
        vetoed=vetoed_BT,
        mismatch_kl=kl_k3(rollout_BT, old_BT, LOG_RATIO_CLAMP) * real_BT,
    )


@dataclass(frozen=True)
class Mismatch:
    """How far trainer and sampler are apart on the sampler's tokens.  B' rows have tokens; without gradient.

    ratio             (B, T) pi_trainer / pi_sampler of tokens, 0 under the mask.
    kl_k1, kl_k3      (B, T) estimates of KL(sampler || trainer), nats per token; k1 of either sign, k3 never negative.
    log_ratio         (B,) of whole rows: sum of the tokens' log ratios.
    perplexity_ratio  (B,) exp(mean_t (rollout_t - old_t)): the trainer's perplexity of a response over the sampler's.
    filled            (B,) bool: rows with tokens; the others mean nothing.
    """

    ratio: Tensor
    kl_k1: Tensor
    kl_k3: Tensor
    log_ratio: Tensor
    perplexity_ratio: Tensor
    filled: Tensor


def mismatch_of(old_logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor) -> Mismatch:
    """The measures of `Mismatch`; all (B, T).  Log ratios are clamped to +-20.  Raises ShapeError."""
    require_matrix(old_logp=old_logp_BT)
    require_same_shape(old_logp=old_logp_BT, rollout_logp=rollout_logp_BT, mask=mask_BT)
    old_BT, rollout_BT = masked_values(old_logp_BT.detach(), mask_BT), masked_values(rollout_logp_BT.detach(), mask_BT)
    real_BT, log_ratio_BT = mask_BT != 0, old_BT - rollout_BT
    return Mismatch(
        ratio=_ratio(log_ratio_BT) * real_BT,
        kl_k1=-log_ratio_BT,
        kl_k3=kl_k3(rollout_BT, old_BT, LOG_RATIO_CLAMP) * real_BT,
        log_ratio=log_ratio_BT.sum(dim=1).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP),
        perplexity_ratio=_ratio(-_row_mean(log_ratio_BT, real_BT)).squeeze(1),
        filled=real_BT.any(dim=1),
    )


def effective_sample_size(weight: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) in (0, 1], n the number of weights (Kish 1965); 0 where all are 0, 1 for equal ones."""
    weight = weight.detach().double()
    squares = float(weight.square().sum())
    return float(weight.sum()) ** 2 / (weight.numel() * squares) if squares > 0 else 0.0


def chi_squared(ratio: Tensor) -> float:
    """mean(ratio^2) - 1: chi^2(trainer || sampler) for ratios of the sampler's draws; 0 without any."""
    return float(ratio.detach().double().square().mean()) - 1.0 if ratio.numel() else 0.0


def _require_settings(kind: str, cap: float, floor: float | None, veto: float | None) -> None:
    if kind not in CORRECTIONS and kind != "none":
        raise ConfigError(
            f"{kind!r} is not an importance correction.{closest(kind, CORRECTIONS)}",
            fix=f"choose one of {', '.join(CORRECTIONS)}",
        )
    if not cap >= 1.0:
        raise ConfigError(f"the importance cap is {cap}", fix="use a number >= 1; 2 is usual")
    if floor is not None and not 0.0 < floor <= 1.0:
        raise ConfigError(f"the importance floor is {floor}", fix="use a number in (0, 1], or none")
    if veto is not None and not 0.0 < veto < 1.0:
        raise ConfigError(f"the importance veto is {veto}", fix="use a number in (0, 1), such as 0.0001, or none")


def _ratio(log_ratio: Tensor) -> Tensor:
    return clamped_log_ratio(log_ratio, torch.zeros_like(log_ratio), LOG_RATIO_CLAMP).exp()


def _row_mean(x_BT: Tensor, real_BT: Tensor) -> Tensor:
    """(B, 1) over the tokens that count, where x is 0 elsewhere."""
    return x_BT.sum(dim=1, keepdim=True) / real_BT.sum(dim=1, keepdim=True).clamp(min=1)


def _mean_weight(weight_BT: Tensor, real_BT: Tensor, *, by_row: bool) -> Tensor:
    """Mean over the tokens, or over rows of which each token has the weight; 1 where it would be 0."""
    if by_row:
        filled_B = real_BT.any(dim=1)
        mean = _row_mean(weight_BT, real_BT).sum() / filled_B.sum().clamp(min=1)
    else:
        mean = weight_BT.sum() / real_BT.sum().clamp(min=1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))
