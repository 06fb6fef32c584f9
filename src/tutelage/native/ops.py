"""The compiled kernels as functions of tensors.

Shapes: B rows, N tokens, H hidden, F inner features, b rows that decode, h query heads, g key/value heads, D head size,
X pages, z positions of a page, P prompts, J pages of the longest prompt, I pages of the longest own part.

Each takes tensors on a CPU, all of one type, float32 or bfloat16: `takes` tells.  Arithmetic is in float32; results are
rounded where torch's operators round them, so they are theirs up to the order of sums and the last place of an
exponential function.  Each runs on `torch.get_num_threads()` threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from tutelage.errors import ShapeError
from tutelage.native.build import kernels

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_decoding = ContextVar("decoding", default=False)


@contextmanager
def in_decoding() -> Iterator[None]:
    """Inside, float32 is taken too: one step of decoding.

    Elsewhere, other threads included, it is not, so that a training run in float32 has torch's own numbers, with a
    compiler or without.
    """
    before = _decoding.set(True)
    try:
        yield
    finally:
        _decoding.reset(before)


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels compute these: plain whole tensors on a CPU, not empty, of one type that they know, outside
    autocast; and whether there are kernels."""
    first = tensors[0]
    if first.dtype not in SUFFIX or (first.dtype == torch.float32 and not _decoding.get()):
        return False
    for x in tensors:
        plain = type(x) is Tensor or type(x) is nn.Parameter
        if not plain or x.device.type != "cpu" or x.dtype != first.dtype or x.numel() == 0:
            return False
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    return kernels().library is not None


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, inverse: bool = False) -> tuple[Tensor, Tensor | None]:
    """(..., H) w x / sqrt(mean(x^2) + eps), and 1 / sqrt(mean(x^2) + eps) (..., 1) float32 where `inverse`."""
    x, weight_H = x.contiguous(), weight_H.contiguous()
    out = torch.empty_like(x)
    kept = torch.empty((*x.shape[:-1], 1), dtype=torch.float32) if inverse else None
    size = x.shape[-1]
    _call("rms_norm", x.dtype, x, weight_H, out, kept, x.numel() // size, size, float(eps), torch.get_num_threads())
    return out, kept


def rms_norm_back(
    x: Tensor, weight_H: Tensor, inverse: Tensor, by_out: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by x and weight, those of `needed`."""
    x, weight_H, inverse, by_out = (t.contiguous() for t in (x, weight_H, inverse, by_out))
    by_x = torch.empty_like(x) if needed[0] else None
    threads, size = torch.get_num_threads(), x.shape[-1]
    parts = torch.zeros((threads, size), dtype=torch.float32) if needed[1] else None
    rows = x.numel() // size
    _call("rms_norm_back", x.dtype, x, weight_H, inverse, by_out, by_x, parts, rows, size, threads)
    return by_x, None if parts is None else parts.sum(0).to(weight_H.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(..., F) silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _call("swiglu", gate.dtype, gate, up, out, gate.numel(), torch.get_num_threads())
    return out


def swiglu_back(
    gate: Tensor, up: Tensor, by_out: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by gate and up, those of `needed`."""
    gate, up, by_out = gate.contiguous(), up.contiguous(), by_out.contiguous()
    by_gate, by_up = (torch.empty_like(gate) if need else None for need in needed)
    _call("swiglu_back", gate.dtype, gate, up, by_out, by_gate, by_up, gate.numel(), torch.get_num_threads())
    return by_gate, by_up


def rotary_fits(x: Tensor, cosine: Tensor, sine: Tensor) -> bool:
    """Whether `rotary` takes x (B, h, N, D), whose rows of D lie together, cosine and sine (B, N, D)."""
    if x.dim() != 4:
        return False
    batch, _, count, size = x.shape
    whole = cosine.shape == (batch, count, size) == sine.shape and size % 2 == 0 and x.stride(3) == 1
    # one batch entry, or one token of each: then tokens are a single strided axis
    return whole and (batch == 1 or count == 1)


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, back: bool = False) -> Tensor:
    """(B, h, N, D) x cos + (-x2, x1) sin, x1 and x2 the halves of D; `back`: the transpose, for gradients.

    x needs rows of D that lie together (`rotary_fits`); the result lies token by token.
    """
    batch, h, count, size = x.shape
    cosine, sine = cosine.contiguous(), sine.contiguous()
    out = torch.empty((batch, count, h, size), dtype=x.dtype).transpose(1, 2)
    token = x.stride(2) if batch == 1 else x.stride(0)
    sizes = (batch * count, h, size, token, x.stride(1), h * size, size)
    _call("rotary", x.dtype, x, cosine, sine, out, *sizes, int(back), torch.get_num_threads())
    return out


def page_write(x: Tensor, pool: Tensor, page_b: Tensor, at_b: Tensor) -> None:
    """Row n of x (b, g, 1, D) goes to position at[n] of page[n] of pool (X, g, z, D); page and at are int64."""
    b, g, _, size = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    _call("page_write", x.dtype, x, pool, page_b, at_b, b, g, pool.shape[2], size, x.stride(0), x.stride(1))


class _Pages(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("of_prompt", "of_row", "lane", "prompt_len", "own_len")),
        *((name, ctypes.c_int64) for name in ("J", "I", "own", "lanes")),
    ]


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pages_of_prompt: Tensor,
    own_of_row: Tensor,
    lane_of_row: Tensor,
    prompt_lens: Tensor,
    own_lens: Tensor,
    own: int,
    lanes: int,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """query (b, h, 1, D), pools (X, g, z, D), contiguous -> (b, 1, h, D): the attention of `models.decoding`.

    Row n reads prompt_lens[n] positions of the pages (P, J) of prompt lane_of_row[n] // lanes, and own_lens[n] + 1 of
    its own (b, I), which are counted from page `own`.  Index tensors are int64.  softcap 0: none.
    """
    b, h, _, size = query.shape
    if not (key.is_contiguous() and value.is_contiguous() and key.shape == value.shape and key.shape[3] == size):
        raise ShapeError(f"query {tuple(query.shape)}, keys {tuple(key.shape)}, values {tuple(value.shape)}: no pools")
    if query.stride(3) != 1:
        query = query.contiguous()
    out = torch.empty((b, 1, h, size), dtype=query.dtype)
    indices = (pages_of_prompt, own_of_row, lane_of_row, prompt_lens, own_lens)
    tensors = [x.contiguous() for x in indices]
    pages = _Pages(*(x.data_ptr() for x in tensors), pages_of_prompt.shape[1], own_of_row.shape[1], own, lanes)
    sizes = (b, h, key.shape[1], key.shape[2], size, query.stride(0), query.stride(1))
    threads = torch.get_num_threads()
    _call(
        "paged_attention", query.dtype, query, key, value, out, ctypes.addressof(pages), *sizes, scale, softcap, threads
    )
    return out


P, I64, F32, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (P, P, P, P, I64, I64, F32, INT),
    "rms_norm_back": (P, P, P, P, P, P, I64, I64, INT),
    "swiglu": (P, P, P, I64, INT),
    "swiglu_back": (P, P, P, P, P, I64, INT),
    "rotary": (P, P, P, P, I64, I64, I64, I64, I64, I64, I64, INT, INT),
    "page_write": (P, P, P, P, I64, I64, I64, I64, I64, I64),
    "paged_attention": (P, P, P, P, P, I64, I64, I64, I64, I64, I64, I64, F32, F32, INT),
}
_functions: dict[tuple[str, torch.dtype], Any] = {}


def _call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    function = _functions.get((name, dtype))
    if function is None:
        function = getattr(kernels().library, f"{name}_{SUFFIX[dtype]}")
        function.argtypes, function.restype = ARGUMENTS[name], None
        _functions[name, dtype] = function
    function(*(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments))
