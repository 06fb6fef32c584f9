"""The elementwise parts of a transformer block, so that the backward pass keeps less: SwiGLU, RMSNorm and rotary
position embedding.

Shapes: B rows, N tokens, F inner features, H hidden, h heads, D head size.

    y_NF = silu(g) * u                     silu(g) = g sigmoid(g)       (Shazeer 2020, arXiv:2002.05202)
    y_NH = w * x / sqrt(mean_H(x^2) + eps)                              (Zhang and Sennrich 2019, arXiv:1910.07467)
    y_D = x cos + (-x2, x1) sin            x1, x2 the halves of x       (Su et al. 2021, arXiv:2104.09864)

Autograd keeps g, silu(g) and u of the first, x and the normalised x of the second.  Here it keeps g and u, x and one
number a token; what is missing is computed again in the backward pass.  The gradient of a norm's weight is summed in
float32.

Where the compiled kernels take the tensors (`native.ops.takes`: bfloat16 on a CPU), each is one pass over memory,
rounded where transformers rounds: its numbers are theirs but for the order of sums and the last place of an
exponential.  Elsewhere the forward pass does what transformers' own modules do, to the bit.
"""

from __future__ import annotations

import functools
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from tutelage.native import ops

MLP_NAMES = ("down_proj", "act_fn", "gate_proj", "up_proj")
NORM_NAMES = ("dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight")
"""What the forward passes that were replaced read, in this order: nothing is replaced where transformers has others."""
ROTARY, HALF = "apply_rotary_pos_emb", "rotate_half"


def fuse(model: nn.Module) -> None:
    """Let the gated blocks, norms and rotary embeddings of `model` compute as above, in place.  Doing it again changes
    nothing.

    A block or norm is one of them where its class has Llama's forward pass to the instruction, an attention where it
    calls a function with the instructions of Llama's rotary embedding; most decoders of transformers have both.
    Others are left as they are.  A deep copy of the model has its own.
    """
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if _computes(module, LlamaMLP, MLP_NAMES) and _is_silu(getattr(module, "act_fn", None)):
            module.forward = MethodType(_gated_forward, module)
        elif _computes(module, LlamaRMSNorm, NORM_NAMES):
            module.forward = MethodType(_norm_forward, module)
        elif (forward := _with_rotary(type(module).forward)) is not None:
            module.forward = MethodType(forward, module)


@functools.cache
def _with_rotary(forward: Any) -> FunctionType | None:
    """The same forward pass with `rotary` for Llama's function; None where it does not call that.

    Llama's is one that has its instructions, and calls a function with those of Llama's `rotate_half`.
    """
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(ROTARY)
    halves = [getattr(function, "__globals__", {}).get(HALF) for function in (own, llama_rotary)]
    if not _same(own, llama_rotary) or not _same(*halves):
        return None
    names = {**forward.__globals__, ROTARY: rotary}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _same(own: Any, known: Any) -> bool:
    """Whether two functions have the same instructions, names and constants, but for the docstring."""
    parts = []
    for function in (own, known):
        code: CodeType | None = getattr(function, "__code__", None)
        if code is None:
            return False
        constants = [constant for constant in code.co_consts if constant != function.__doc__]
        parts.append((code.co_code, code.co_names, constants))
    return parts[0] == parts[1]


def _computes(module: nn.Module, known: type[nn.Module], names: tuple[str, ...]) -> bool:
    code: CodeType = known.forward.__code__
    return code.co_names == names and _same(type(module).forward, known.forward)


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
    return _gated(gate, up)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return ops.swiglu(gate, up) if gate.shape == up.shape and ops.takes(gate, up) else silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(..., H) x / sqrt(mean(x^2) + eps) in float32, rounded to the type of x, times weight."""
    if _recorded(x, weight):
        out: Tensor = _RMSNorm.apply(x, weight, eps)
        return out
    return _normed(x, weight, eps, keep=False)[0]


def _normed(x: Tensor, weight_H: Tensor, eps: float, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The normalised x, and what it was multiplied with where it is kept."""
    if x.shape[-1:] == weight_H.shape and ops.takes(x, weight_H):
        return ops.rms_norm(x, weight_H, eps, inverse=keep)
    wide = x.float()
    inverse = _inverse(wide, eps)
    return weight_H * (wide * inverse).to(x.dtype), inverse


def rotary(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """query (B, h, N, D), key (B, g, N, D), cosine and sine (B, N, D) -> both, turned by their positions."""
    fits = unsqueeze_dim == 1 and all(ops.rotary_fits(x, cosine, sine) for x in (query, key))
    if not fits or cosine.requires_grad or not ops.takes(query, key, cosine, sine):
        turned: tuple[Tensor, Tensor] = llama_rotary(query, key, cosine, sine, unsqueeze_dim=unsqueeze_dim)
        return turned
    return _turned(query, cosine, sine), _turned(key, cosine, sine)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    if _recorded(x):
        out: Tensor = _Rotary.apply(x, cosine, sine)
        return out
    return ops.rotary(x, cosine, sine)


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
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """d g = dy u silu'(g),  d u = dy silu(g)."""
        gate, up = ctx.saved_tensors
        if ops.takes(gate, up, by_out):
            return ops.swiglu_back(gate, up, by_out, ctx.needs_input_grad)
        by_gate = torch.ops.aten.silu_backward(by_out * up, gate) if ctx.needs_input_grad[0] else None
        by_up = silu(gate).mul_(by_out) if ctx.needs_input_grad[1] else None
        return by_gate, by_up


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        out, inverse = _normed(x, weight_H, eps, keep=True)
        ctx.save_for_backward(x, weight_H, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With z = x r the normalised x and d z = dy w:  d x = r (d z - z mean(d z z)),  d w = sum_N dy z."""
        x, weight_H, inverse = ctx.saved_tensors
        if ops.takes(x, weight_H, by_out):
            return *ops.rms_norm_back(x, weight_H, inverse, by_out, ctx.needs_input_grad[:2]), None
        by_x = by_weight_H = None
        z = x.float() * inverse
        if ctx.needs_input_grad[1]:
            by_weight_H = (by_out.float() * z).flatten(0, -2).sum(0).to(weight_H.dtype)
        if ctx.needs_input_grad[0]:
            by_z = by_out.float() * weight_H.float()
            mean = (by_z * z).mean(-1, keepdim=True)
            by_x = by_z.sub_(z.mul_(mean)).mul_(inverse).to(x.dtype)
        return by_x, by_weight_H, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return ops.rotary(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        by_out = by_out if by_out.stride(3) == 1 else by_out.contiguous()
        return ops.rotary(by_out, cosine, sine, back=True), None, None
