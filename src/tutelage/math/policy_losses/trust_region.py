"""Divergence proximal policy optimisation: a token is held back by how far its distribution moved, not by its ratio.

Shapes: B sequences, T response tokens.

    loss_t = -M_t r_t A_t,   M_t = 0 where A_t > 0, r_t > 1 and D_t > high, or A_t < 0, r_t < 1 and D_t > low; else 1

(Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning", 2602.04879.)  D_t is a divergence of the
old distribution from the policy's, seen through the sampled token alone: it is or it is not drawn (the paper's binary
approximation; its Top-K approximation needs more logprobs than rollouts hold).  The ratio 1.3 of a token of probability
0.7 is a large move, that of one of probability 1e-5 is none.

The paper's anchor is the policy that sampled: `off_policy.old_logprobs: rollout`.  r_t is truncated at ratio_cap, its
gradient included, as in the authors' code.  Their recipe aggregates with constant_horizon.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.math.policy_loss import PolicyTerms, policy_terms
from tutelage.math.policy_losses.inputs import Inputs, inputs_of, require_above, require_at_least


def dppo_tv(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    low: float,
    high: float,
    ratio_cap: float = 20.0,
) -> PolicyTerms:
    """D_t = |pi(y_t) - pi_old(y_t)|, the total variation of the two binary distributions; bounds in probability.

    Raises ConfigError unless low and high are above 0 and ratio_cap >= 1.
    """
    require_above(low=low, high=high)
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    moved = x.logp.detach().exp() - x.old_logp.exp()
    return _masked(x, moved.abs(), low, high, ratio_cap)


def dppo_kl(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    low: float,
    high: float,
    ratio_cap: float = 20.0,
) -> PolicyTerms:
    """D_t = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), q = pi_old(y_t), p = pi(y_t); bounds in nats.

    Infinite where p is 1 and q is not.  Raises ConfigError unless low and high are above 0 and ratio_cap >= 1.
    """
    require_above(low=low, high=high)
    x = inputs_of(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    return _masked(x, binary_kl(x.old_logp, x.logp.detach()), low, high, ratio_cap)


def binary_kl(old_logp: Tensor, logp: Tensor) -> Tensor:
    """KL of Bernoulli(exp old_logp) from Bernoulli(exp logp), elementwise; nats.  Logprobs above 0 count as 0."""
    old_logp, logp = old_logp.clamp(max=0.0), logp.clamp(max=0.0)
    q, rest_q, rest_p = old_logp.exp(), -torch.expm1(old_logp), -torch.expm1(logp)
    drawn = torch.where(q > 0, q * (old_logp - logp), 0.0)
    others = torch.where(rest_q > 0, rest_q * (rest_q.log() - rest_p.log()), 0.0)
    return drawn + others


def _masked(x: Inputs, divergence_BT: Tensor, low: float, high: float, ratio_cap: float) -> PolicyTerms:
    require_at_least(1.0, ratio_cap=ratio_cap)
    moved_BT = x.log_ratio.detach()
    too_far_up = (x.advantage > 0) & (moved_BT > 0) & (divergence_BT > high)
    too_far_down = (x.advantage < 0) & (moved_BT < 0) & (divergence_BT > low)
    held = too_far_up | too_far_down
    weight = moved_BT.exp().clamp(max=ratio_cap)
    surrogate = weight * (x.logp - x.logp.detach()).exp()  # the value of `weight`, and its multiple of grad log pi
    loss = (-x.advantage * surrogate).masked_fill(held, 0.0)
    return policy_terms(loss, x.logp, x.old_logp, clipped=held)
