"""Logprob and entropy straight from the hidden states, where the head is one matrix: three products, one buffer.

Shapes: N flat tokens, n of one chunk, t of one tile of a chunk, V vocabulary, H hidden.

With z = (W h + b) / temperature, log p = z - logsumexp(z), and y the target:

    logp = log p_y              d logp / d z_v    = 1{v = y} - p_v
    H    = - sum_v p_v log p_v  d H / d z_v       = - p_v (log p_v + H)

The forward pass keeps numbers per token, and the logits only where they fit a budget; else the backward pass computes
them again, chunk by chunk.  It writes the gradient by the logits over them, so that one (n, V) buffer is alive, and
adds each chunk's part to the gradients of the matrix and the hidden states in place.  What is elementwise is done on
tiles of a few rows, which stay in the cache.  Products run in the type of the hidden states, softmax and entropy in
float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tutelage.math.masking import at_least_float32

TILE_BYTES = {"cpu": 2 << 20}
"""Of the elementwise work at a time, by device; elsewhere WIDE_TILE_BYTES: launching costs more than memory there."""
WIDE_TILE_BYTES = 64 << 20
NO_PROBABILITY = -1e4
"""exp of this is 0 in float32 and float64: log p is cut there, so that 0 log 0 is 0 and not NaN."""


@runtime_checkable
class LinearHead(Protocol):
    """A head that can say what it is made of."""

    def linear(self) -> tuple[Tensor, Tensor | None] | None:
        """weight (V, H) and bias (V,) where the logits are weight h + bias and nothing else; None where they are not.

        Both are plain tensors, whole, in the type of the hidden states.
        """
        ...


@dataclass(frozen=True)
class _Pass:
    """rows: of a chunk.  keep: hold the logits, which are one chunk, for the backward pass."""

    temperature: float
    rows: int
    keep: bool
    entropy: bool


def linear_outputs(
    hidden_NH: Tensor,
    targets_N: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    *,
    entropy: bool,
    temperature: float,
    chunk_tokens: int,
    chunk_bytes: int,
    keep_logits: bool = True,
) -> dict[str, Tensor]:
    """logp (N,), and the entropy (N,) where asked for, in nats, with gradient to hidden states, weight and bias.

    chunk_tokens, chunk_bytes: bounds of the (n, V) buffer.  Logits that fit chunk_bytes as a whole are kept for the
    backward pass: three products; else they are computed again in it: four, and a chunk alone is alive at any moment.
    The weight's gradient is computed only where it is trained.  Shapes and temperature are the caller's to check.
    """
    row_bytes = max(weight_VH.shape[0] * hidden_NH.element_size(), 1)
    fitting = max(chunk_bytes // row_bytes, 1)
    inputs = [hidden_NH, weight_VH] if bias_V is None else [hidden_NH, weight_VH, bias_V]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    keep = keep_logits and recorded and 0 < len(hidden_NH) <= fitting
    rows = len(hidden_NH) if keep else min(chunk_tokens, fitting)
    how = _Pass(temperature, rows, keep, entropy)
    logp_N, entropy_N = _LinearOutputs.apply(hidden_NH, weight_VH, bias_V, targets_N, how)
    return {"logp": logp_N, "entropy": entropy_N} if entropy else {"logp": logp_N}


class _LinearOutputs(torch.autograd.Function):
    """(logp, entropy or None) of hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, how: _Pass
    ) -> tuple[Tensor, Tensor | None]:
        wide = at_least_float32(hidden_NH.new_empty(0)).dtype
        logp_N = hidden_NH.new_empty(len(hidden_NH), dtype=wide)
        entropy_N = torch.empty_like(logp_N) if how.entropy else None
        buffer_nV = _buffer(hidden_NH, weight_VH, how.rows)
        for chunk in _slices(len(hidden_NH), how.rows):
            logits_nV = _logits(hidden_NH[chunk], weight_VH, bias_V, buffer_nV)
            for tile in _tiles(logits_nV):
                at = slice(chunk.start + tile.start, chunk.start + tile.stop)
                logp_tV = torch.log_softmax(_scaled(logits_nV[tile], how.temperature), dim=-1)
                torch.gather(logp_tV, 1, targets_N[at, None], out=logp_N[at, None])
                if entropy_N is not None:
                    p_tV = logp_tV.exp()
                    entropy_N[at] = p_tV.mul_(logp_tV.clamp_(min=NO_PROBABILITY)).sum(-1).neg_()
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, entropy_N)
        ctx.how, ctx.kept_nV = how, buffer_nV if how.keep else None
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, entropy_N = ctx.saved_tensors
        by_logp_N, by_entropy_N = grads
        how: _Pass = ctx.how
        if by_logp_N is None and by_entropy_N is None:
            return (None,) * 5
        if by_logp_N is None:
            assert by_entropy_N is not None
            by_logp_N = torch.zeros_like(by_entropy_N)
        found = _Gradients.of(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad)
        # the gradient is written over the logits: a second backward pass through this graph computes them again
        kept_nV, ctx.kept_nV = ctx.kept_nV, None
        buffer_nV = _buffer(hidden_NH, weight_VH, how.rows) if kept_nV is None else kept_nV
        for chunk in _slices(len(hidden_NH), how.rows):
            known = kept_nV is not None
            part_nH = hidden_NH[chunk]
            grad_nV = buffer_nV[: len(part_nH)] if known else _logits(part_nH, weight_VH, bias_V, buffer_nV)
            for tile in _tiles(grad_nV):
                at = slice(chunk.start + tile.start, chunk.start + tile.stop)
                of_entropy = None if by_entropy_N is None else (by_entropy_N[at], entropy_N[at])
                scaled_tV = _scaled(grad_nV[tile], how.temperature)
                grad_tV = _by_logits(scaled_tV, targets_N[at], by_logp_N[at], of_entropy, how.temperature)
                grad_nV[tile].copy_(grad_tV)
            found.add(chunk, grad_nV, part_nH, weight_VH)
        return found.hidden, found.weight, found.bias(bias_V), None, None


@dataclass(eq=False)
class _Gradients:
    """By hidden states (N, H), weight (V, H) and bias (V,), of those that need one; the bias's in float32 at least."""

    hidden: Tensor | None
    weight: Tensor | None
    of_bias: Tensor | None

    @classmethod
    def of(cls, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needed: tuple[bool, ...]) -> _Gradients:
        new = torch.empty_like if len(hidden_NH) else torch.zeros_like  # without a chunk nothing will write them
        return cls(
            new(hidden_NH) if needed[0] else None,
            new(weight_VH) if needed[1] else None,
            torch.zeros_like(at_least_float32(bias_V)) if bias_V is not None and needed[2] else None,
        )

    def add(self, chunk: slice, grad_nV: Tensor, hidden_nH: Tensor, weight_VH: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(grad_nV, weight_VH, out=self.hidden[chunk])
        if self.weight is not None:
            beta = 0.0 if chunk.start == 0 else 1.0  # beta 0: what is there is not read
            self.weight.addmm_(grad_nV.t(), hidden_nH, beta=beta)
        if self.of_bias is not None:
            self.of_bias += grad_nV.sum(0, dtype=self.of_bias.dtype)

    def bias(self, like_V: Tensor | None) -> Tensor | None:
        return None if self.of_bias is None or like_V is None else self.of_bias.to(like_V.dtype)


def _by_logits(
    scaled_tV: Tensor,
    targets_t: Tensor,
    by_logp_t: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
) -> Tensor:
    """(t, V) gradient by the logits.  of_entropy: the gradient by the entropy, and the entropy."""
    by_logp_t1 = by_logp_t[:, None] / temperature
    if of_entropy is None:
        grad_tV = torch.softmax(scaled_tV, dim=-1).mul_(-by_logp_t1)
    else:
        by_entropy_t1, entropy_t1 = (x_t[:, None] for x_t in of_entropy)
        by_entropy_t1 = by_entropy_t1 / temperature
        logp_tV = torch.log_softmax(scaled_tV, dim=-1)
        grad_tV = logp_tV.exp()
        factor_tV = logp_tV.clamp_(min=NO_PROBABILITY).mul_(by_entropy_t1).add_(by_logp_t1 + by_entropy_t1 * entropy_t1)
        grad_tV.mul_(factor_tV.neg_())
    return grad_tV.scatter_add_(1, targets_t[:, None], by_logp_t1.to(grad_tV))


def _buffer(hidden_NH: Tensor, weight_VH: Tensor, rows: int) -> Tensor:
    return hidden_NH.new_empty(min(rows, len(hidden_NH)), weight_VH.shape[0])


def _logits(hidden_nH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, buffer: Tensor) -> Tensor:
    """(n, V), in the first rows of the buffer."""
    out_nV = buffer[: len(hidden_nH)]
    if bias_V is None:
        return torch.mm(hidden_nH, weight_VH.t(), out=out_nV)
    return torch.addmm(bias_V, hidden_nH, weight_VH.t(), out=out_nV)


def _scaled(logits_tV: Tensor, temperature: float) -> Tensor:
    """In float32 at least; the logits themselves are left as they are."""
    wide_tV = at_least_float32(logits_tV)
    return wide_tV if temperature == 1.0 else wide_tV / temperature


def _slices(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, max(rows, 1)):
        yield slice(start, min(start + rows, count))


def _tiles(logits_nV: Tensor) -> Iterator[slice]:
    row_bytes = 4 * max(logits_nV.shape[1], 1)
    limit = TILE_BYTES.get(logits_nV.device.type, WIDE_TILE_BYTES)
    return _slices(len(logits_nV), max(limit // row_bytes, 1))
