"""Weights of tokens and pairs: LD-DPO and WPO.   Shapes: N flat tokens, B answers, P pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.math.masking import at_least_float32, require_same_shape


def public_weights(position_N: Tensor, public_N: Tensor, alpha: float) -> Tensor:
    """1 within the public length, alpha past it   (LD-DPO, Liu et al. 2024, arXiv:2409.06411).

    position_N: how many trained tokens of its answer stand before a token.  public_N: the shorter answer's length, of
    the pair that the token is in.  float32 (N,).  Raises ShapeError when shapes differ.
    """
    require_same_shape(position=position_N, public=public_N)
    return torch.where(position_N < public_N, 1.0, alpha)


def pair_weights(
    chosen_logp_P: Tensor,
    rejected_logp_P: Tensor,
    chosen_len_P: Tensor,
    rejected_len_P: Tensor,
    chosen_collision_P: Tensor | None = None,
    rejected_collision_P: Tensor | None = None,
) -> Tensor:
    """w(y_w) w(y_l), w(y) = exp((log pi(y | x) - c(y)) / |y|)   (WPO, Zhou et al. 2024, arXiv:2406.11827, eq. 2).

    Logprobs of whole answers, summed over trained tokens, nats.  c(y) is 0, or the collision: log sum_v pi(v)^2 summed
    over the tokens, which gives weight 1 on average over what the policy itself would write (sampled alignment).
    (P,), without gradient.
    """
    logp = {"chosen": chosen_logp_P, "rejected": rejected_logp_P}
    require_same_shape(**logp, chosen_len=chosen_len_P, rejected_len=rejected_len_P)
    chosen_P, rejected_P = at_least_float32(chosen_logp_P.detach()), at_least_float32(rejected_logp_P.detach())
    if chosen_collision_P is not None and rejected_collision_P is not None:
        chosen_P, rejected_P = chosen_P - chosen_collision_P.detach(), rejected_P - rejected_collision_P.detach()
    return torch.exp(chosen_P / chosen_len_P + rejected_P / rejected_len_P)
