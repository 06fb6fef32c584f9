"""Losses that couple the items of a mini-batch (a sort, a batch mean), with a gradient that no cut can change.

Shapes: N items (tokens, sequences or pairs) of the global mini-batch, n of them in one micro-batch, K scalars per item.

The loss is L = f(s_1, ..., s_N) with s_i = s_i(theta) the scalars of item i. By the chain rule

    dL/dtheta = sum_i (df/ds_i) ds_i/dtheta,

and only df/ds_i looks at more than one item. So, in two passes:

    1. Without gradient, compute the scalars of every item of the mini-batch, in micro-batches of any size, on any rank;
       gather them to one tensor of shape (N,) or (N, K).
    2. `coupled_loss(scalars, f)` returns the loss and its derivative by every scalar: once, globally.
    3. For each micro-batch, compute its scalars again, with gradient, and backpropagate
       `surrogate(scalars_now, derivative[of those items])`; gradients are summed over micro-batches and ranks.

The parameters must not change between 1 and 3. The surrogate's *value* means nothing; report the loss of step 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutelage.errors import ShapeError, TrainingError
from tutelage.math.masking import require_same_shape


def coupled_loss(scalars: Tensor, loss_of_scalars: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(loss, derivative): the loss of all scalars, detached, and d loss / d scalars, of their shape, detached.

    scalars: (N,) or (N, K), every item of the global mini-batch; taken as constants. Works under `no_grad` too.
    Raises ShapeError when the loss is no scalar, TrainingError when it does not depend on the scalars through autograd.
    """
    with torch.enable_grad():
        leaf = scalars.detach().requires_grad_(True)
        loss = loss_of_scalars(leaf)
        if loss.dim() != 0:
            raise ShapeError(f"the coupled loss has shape {tuple(loss.shape)}", fix="return a scalar")
        if not loss.requires_grad:
            raise TrainingError(
                "the coupled loss does not depend on the scalars it was given",
                fix="compute it from its argument, without detach, item() or no_grad",
            )
        (derivative,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), derivative


def surrogate(scalars_now: Tensor, derivative: Tensor) -> Tensor:
    """sum stopgrad(derivative) * scalars_now: a scalar with this micro-batch's part of the loss's gradient.

    Both (n,) or (n, K), the same items in the same order. Raises ShapeError when shapes differ.
    """
    require_same_shape(scalars_now=scalars_now, derivative=derivative)
    return (derivative.detach() * scalars_now).sum()
