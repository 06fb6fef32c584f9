"""The elementwise parts of a transformer block, so that the backward pass keeps less: SwiGLU and RMSNorm.

Shapes: N tokens, F inner features, H hidden.

    y_NF = silu(g) * u                     silu(g) = g sigmoid(g)       (Shazeer 2020, arXiv:2002.05202)
    y_NH = w * x / sqrt(mean_H(x^2) + eps)                              (Zhang and Sennrich 2019, arXiv:1910.07467)

Autograd keeps g, silu(g) and u of the first, x and the normalised x of the second.  Here it keeps g and u, x and one
number a token; what is missing is computed again in the backward pass.  The forward pass does what transformers' own
modules do, so its numbers are theirs to the bit.  The gradient of a norm's weight is summed in float32.
"""

from __future__ import annotations

from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

MLP_NAMES = ("down_proj", "act_fn", "gate_proj", "up_proj")
NORM_NAMES = ("dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight")
"""What the forward passes that were replaced read, in this order: nothing is replaced where transformers has others."""


def fuse(model: nn.Module) -> None:
    """Let the gated blocks and norms of `model` compute as above, in place.  Doing it again changes nothing.

    A module is one of them where its class has Llama's forward pass to the instruction, which most decoders of
    transformers have; others are left as they are.  A deep copy of the model has its own.
    """
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if _computes(module, LlamaMLP, MLP_NAMES) and _is_silu(getattr(module, "act_fn", None)):
            module.forward = MethodType(_gated_forward, module)
        elif _computes(module, LlamaRMSNorm, NORM_NAMES):
            module.forward = MethodType(_norm_forward, module)


def _computes(module: nn.Module, known: type[nn.Module], names: tuple[str, ...]) -> bool:
    own: CodeType | None = getattr(type(module).forward, "__code__", None)
    code = known.forward.__code__
    if own is None or own.co_names != names:
        return False
    return (own.co_code, own.co_consts, own.co_names) == (code.co_code, code.co_consts, code.co_names)


def _is_silu(activation: Any) -> bool:
    return isinstance(activation, (nn.SiLU, SiLUActivation))


def _gated_forward(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
    return out


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(..., F) silu(gate) * up."""
    if _recorded(gate, up):
        out: Tensor = _Swiglu.apply(gate, up)
        return out
    return silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(..., H) x / sqrt(mean(x^2) + eps) in float32, rounded to the type of x, times weight."""
    if _recorded(x, weight):
        out: Tensor = _RMSNorm.apply(x, weight, eps)
        return out
    wide = x.float()
    return weight * (wide * _inverse(wide, eps)).to(x.dtype)


def _recorded(*inputs: Tensor) -> bool:
    """Whether autograd would record these.  What a mesh of ranks holds as one tensor is left to its own operators."""
    plain = all(type(x) in (Tensor, nn.Parameter) for x in inputs)
    return plain and torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _inverse(wide: Tensor, eps: float) -> Tensor:
    """(..., 1) 1 / sqrt(mean(x^2) + eps)."""
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """d g = dy u silu'(g),  d u = dy silu(g)."""
        gate, up = ctx.saved_tensors
        by_gate = torch.ops.aten.silu_backward(by_out * up, gate) if ctx.needs_input_grad[0] else None
        by_up = silu(gate).mul_(by_out) if ctx.needs_input_grad[1] else None
        return by_gate, by_up


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = _inverse(wide, eps)
        ctx.save_for_backward(x, weight_H, inverse)
        return weight_H * (wide * inverse).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With z = x r the normalised x and d z = dy w:  d x = r (d z - z mean(d z z)),  d w = sum_N dy z."""
        x, weight_H, inverse = ctx.saved_tensors
        by_x = by_weight_H = None
        z = x.float() * inverse
        if ctx.needs_input_grad[1]:
            by_weight_H = (by_out.float() * z).flatten(0, -2).sum(0).to(weight_H.dtype)
        if ctx.needs_input_grad[0]:
            by_z = by_out.float() * weight_H.float()
            mean = (by_z * z).mean(-1, keepdim=True)
            by_x = by_z.sub_(z.mul_(mean)).mul_(inverse).to(x.dtype)
        return by_x, by_weight_H, None
