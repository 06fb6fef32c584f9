"""The optimal token baseline: one for every token position of a group.

Shapes: B sequences, T response tokens; G responses in a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.math.masking import at_least_float32, masked_values, require_matrix, require_same_shape


def optimal_token_baseline(
    return_BT: Tensor, old_logp_BT: Tensor, log_collision_BT: Tensor, group_B: Tensor, mask_BT: Tensor
) -> Tensor:
    """A_it = G_it - b_t,  b_t = sum_j W_jt G_jt / sum_j W_jt   (Li et al., The Optimal Token Baseline).

        W_jt = sum_{s <= t} w_js,    w = 1 - 2 p(y) + sum_v p_v^2

    over the responses j of the group of i that have a token t.  G is the return from token t on.  w is the squared norm
    of the gradient of log p(y) by the logits, so W stands for the squared norm of the gradient so far: the baseline of
    least variance.  t counts the tokens of the policy: a hole in the mask is no step.

    Where one response alone has a token t (the tail of the longest), b_t is its own return: A = 0, as for a response
    that is alone in its group.  Where all returns of step t are equal, A = 0 exactly.  Where every W is 0 (tokens that
    were certain), b_t is the plain mean.

    return, old_logp, log_collision (log sum_v p_v^2), mask: (B, T); group: (B,).  Returns (B, T), 0 under the mask,
    what lies there is never read.  Raises ShapeError.
    """
    require_matrix(mask=mask_BT)
    require_same_shape(returns=return_BT, old_logp=old_logp_BT, log_collision=log_collision_BT, mask=mask_BT)
    real_BT = mask_BT != 0
    p_BT = masked_values(old_logp_BT, mask_BT).exp()
    collision_BT = masked_values(log_collision_BT, mask_BT).exp()
    energy_BT = (1.0 - 2.0 * p_BT + collision_BT).clamp(min=0.0).masked_fill(~real_BT, 0.0).cumsum(dim=1)

    # the t-th token of the policy in column t, the holes behind them
    order_BT = torch.argsort((~real_BT).to(torch.int8), dim=1, stable=True)
    return_Bt = masked_values(return_BT, mask_BT).gather(1, order_BT)
    energy_Bt, real_Bt = energy_BT.gather(1, order_BT), real_BT.gather(1, order_BT)

    names_g, inverse_B = torch.unique(group_B, return_inverse=True)
    empty_gt = return_Bt.new_zeros(len(names_g), return_Bt.shape[1])
    alive_Bt = real_Bt.to(return_Bt.dtype)

    def summed(x_Bt: Tensor) -> Tensor:
        return empty_gt.index_add(0, inverse_B, x_Bt * alive_Bt)

    weight_gt, count_gt = summed(energy_Bt), summed(torch.ones_like(return_Bt))
    weighted_gt = summed(energy_Bt * return_Bt) / torch.where(weight_gt > 0, weight_gt, 1.0)
    plain_gt = summed(return_Bt) / count_gt.clamp(min=1.0)
    baseline_gt = torch.where(weight_gt > 0, weighted_gt, plain_gt)
    equal_gt = _extreme(return_Bt, real_Bt, inverse_B, empty_gt, "amax") == _extreme(
        return_Bt, real_Bt, inverse_B, empty_gt, "amin"
    )
    found_Bt = (return_Bt - baseline_gt[inverse_B]).masked_fill(equal_gt[inverse_B] | ~real_Bt, 0.0)
    return at_least_float32(torch.zeros_like(found_Bt).scatter(1, order_BT, found_Bt))


def _extreme(x_Bt: Tensor, real_Bt: Tensor, inverse_B: Tensor, empty_gt: Tensor, kind: str) -> Tensor:
    """(groups, T) the largest or smallest entry that is real."""
    outside = -torch.inf if kind == "amax" else torch.inf
    index_Bt = inverse_B[:, None].expand_as(x_Bt)
    return empty_gt.scatter_reduce(0, index_Bt, x_Bt.masked_fill(~real_Bt, outside), kind, include_self=False)
