"""Collectives that gradients go through.

Two conventions, and a function belongs to one of them.

Cut rows (`summed`, `gathered`, `exchanged`): the program of all peers is one function of all their inputs, and the
objective is the sum of what the peers hold.  The backward pass is the adjoint of the forward map: all-reduce <->
all-reduce, all-gather <-> reduce-scatter, all-to-all <-> all-to-all.  Peers that compute the same loss divide it by
their number, and sum their weight gradients.

Cut matrices (`reduced`, `copied`): all peers hold the same loss, which counts once.  The backward pass of a sum of the
peers' parts hands every part the gradient of the sum; the backward pass of a tensor that every peer uses for a part of
the work sums the gradients of the parts (Shoeybi et al. 2019, arXiv:1909.08053, the operators g and f).

Every peer of the group must make the same calls in the same order; a missing one ends in the group's timeout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tutelage.models.parallel.compat import all_gather, reduce_scatter


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the peers' x, on every peer; gradients are summed too. Any shape, the same on every peer."""
    return _Summed.apply(x, group)


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """(peers, ...): everyone's x in the order of the peers; each peer gets back the sum of the gradients of its own."""
    return _Gathered.apply(x, group)


def exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    """x (peers, ...), part p for peer p -> (peers, ...), part p from peer p; gradients travel back the same way."""
    return _Exchanged.apply(x, group)


def reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the peers' x, of which all compute one and the same loss; each part gets the gradient of the sum."""
    return _Reduced.apply(x, group)


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """x itself, the same on every peer, each using it for a part of the work; its gradient is the sum of the parts'."""
    return _Copied.apply(x, group)


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((dist.get_world_size(group), *x.shape))
        all_gather(out.flatten(0, 1) if x.ndim else out, x.contiguous(), group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        out = torch.empty_like(grad[0])
        reduce_scatter(out, grad.flatten(0, 1) if out.ndim else grad, ctx.group)
        return out, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None
