"""Logprob and entropy straight from the hidden states, where the head is one matrix: by blocks of the vocabulary.

Shapes: N flat tokens, n of one chunk, V vocabulary, v of one block of it, t rows of a tile of a block, H hidden.

With z = (W h + b) / temperature, log p = z - logsumexp(z), and y the target:

    logp = log p_y              d logp / d z_v    = 1{v = y} - p_v
    H    = - sum_v p_v log p_v  d H / d z_v       = - p_v (log p_v + H)

The forward pass goes through the vocabulary block by block and keeps numbers per token (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"): with m the largest logit so far and d = z - m <= 0,

    s = sum_v exp(d_v),  e = sum_v exp(d_v) d_v;      logsumexp = m + log s,  H = log s - e / s
    a larger m' moves d by g = m - m':                s' = s exp(g),  e' = (e + g s) exp(g)

It keeps the logits too where they fit a budget; else the backward pass computes each block again.  It writes the
gradient by the logits over them, in the cache where blocks are small, and each block's part of the matrix's gradient is
written once for a chunk of tokens.  Products run in the type of the hidden states, the rest in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tutelage.errors import ShapeError
from tutelage.math.masking import at_least_float32

BLOCK_BYTES = {"cpu": 16 << 20}
"""Of a block of logits, by device; elsewhere what the caller allows: launching costs more than memory there."""
TILE_BYTES = {"cpu": 2 << 20}
"""Of the elementwise work at a time, by device; elsewhere WIDE_TILE_BYTES."""
WIDE_TILE_BYTES = 64 << 20
FEWEST_COLUMNS = 512
"""Of a block: with fewer the products are too thin.  Chunks then have fewer tokens."""
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
    """rows, columns: of a block.  keep: hold the logits, which fit the budget, for the backward pass."""

    temperature: float
    rows: int
    columns: int
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
    chunk_bytes: int,
    keep_logits: bool = True,
) -> dict[str, Tensor]:
    """logp (N,), and the entropy (N,) where asked for, in nats, with gradient to hidden states, weight and bias.

    chunk_bytes: bound of the logits that are alive, at least one row of one block.  Logits that fit it as a whole are
    kept for the backward pass: three products; else they are computed again in it: four, and a block alone is alive.
    The weight's gradient is computed only where it is trained.  Shapes and temperature are the caller's to check.
    """
    size = hidden_NH.element_size()
    count, vocabulary = len(hidden_NH), weight_VH.shape[0]
    inputs = [hidden_NH, weight_VH] if bias_V is None else [hidden_NH, weight_VH, bias_V]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    keep = keep_logits and recorded and 0 < count * vocabulary * size <= chunk_bytes
    elements = max(min(chunk_bytes, BLOCK_BYTES.get(hidden_NH.device.type, chunk_bytes)) // size, 1)
    narrow = min(FEWEST_COLUMNS, vocabulary, elements)
    rows = max(min(count, elements // max(narrow, 1)), 1)
    how = _Pass(temperature, rows, max(min(elements // rows, vocabulary), 1), keep, entropy)
    logp_N, entropy_N = _LinearOutputs.apply(hidden_NH, weight_VH, bias_V, targets_N, how)
    return {"logp": logp_N, "entropy": entropy_N} if entropy else {"logp": logp_N}


class _LinearOutputs(torch.autograd.Function):
    """(logp, entropy or None) of hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, how: _Pass
    ) -> tuple[Tensor, Tensor | None]:
        _require_targets(targets_N, weight_VH.shape[0])
        sums = _Sums.of(hidden_NH, how.entropy)
        kept = hidden_NH.new_empty(len(hidden_NH) * weight_VH.shape[0]) if how.keep else None
        scratch = hidden_NH.new_empty(0 if how.keep else how.rows * how.columns)
        for chunk, block in _blocks(len(hidden_NH), weight_VH.shape[0], how):
            out_nv = _room(kept, scratch, chunk, block, weight_VH.shape[0])
            logits_nv = _logits(hidden_NH[chunk], weight_VH[block], None if bias_V is None else bias_V[block], out_nv)
            for tile in _tiles(logits_nv):
                at = slice(chunk.start + tile.start, chunk.start + tile.stop)
                sums.add(at, _scaled(logits_nv[tile], how.temperature), targets_N[at] - block.start)
        logp_N, entropy_N = sums.logp(), sums.entropy()
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, sums.top, sums.sum.log(), entropy_N)
        ctx.how, ctx.kept = how, kept
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, top_N, log_sum_N, entropy_N = ctx.saved_tensors
        by_logp_N, by_entropy_N = grads
        how: _Pass = ctx.how
        if by_logp_N is None and by_entropy_N is None:
            return (None,) * 5
        if by_logp_N is None:
            assert by_entropy_N is not None
            by_logp_N = torch.zeros_like(by_entropy_N)
        found = _Gradients.of(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad)
        # the gradient is written over the logits: a second backward pass through this graph computes them again
        kept, ctx.kept = ctx.kept, None
        scratch = hidden_NH.new_empty(how.rows * how.columns if kept is None else 0)
        for chunk, block in _blocks(len(hidden_NH), weight_VH.shape[0], how):
            grad_nv = _room(kept, scratch, chunk, block, weight_VH.shape[0])
            if kept is None:
                _logits(hidden_NH[chunk], weight_VH[block], None if bias_V is None else bias_V[block], grad_nv)
            for tile in _tiles(grad_nv):
                at = slice(chunk.start + tile.start, chunk.start + tile.stop)
                logp_tv = _logprobs(grad_nv[tile], top_N[at], log_sum_N[at], how.temperature)
                of_entropy = None if by_entropy_N is None else (by_entropy_N[at], entropy_N[at])
                grad_tv = _by_logits(logp_tv, targets_N[at] - block.start, by_logp_N[at], of_entropy, how.temperature)
                if grad_tv.data_ptr() != grad_nv[tile].data_ptr():
                    grad_nv[tile].copy_(grad_tv)
            found.add(chunk, block, grad_nv, hidden_NH[chunk], weight_VH[block])
        return found.hidden(hidden_NH), found.weight, found.bias(bias_V), None, None


def _require_targets(targets_N: Tensor, vocabulary: int) -> None:
    outside_N = (targets_N < 0) | (targets_N >= vocabulary)
    if bool(outside_N.any()):
        raise ShapeError(
            f"target {int(targets_N[outside_N][0])} is no token of a vocabulary of {vocabulary}",
            fix="leave the positions out that have no target: no id is skipped",
        )


@dataclass(eq=False)
class _Sums:
    """What is known of each token's distribution (N,), in float32 at least.

    top: m, sum: s, weighted: e of the formulas above, of the blocks so far.  aim: z of the target.
    """

    top: Tensor
    sum: Tensor
    aim: Tensor
    weighted: Tensor | None

    @classmethod
    def of(cls, hidden_NH: Tensor, entropy: bool) -> _Sums:
        zero_N = hidden_NH.new_zeros(len(hidden_NH), dtype=at_least_float32(hidden_NH.new_empty(0)).dtype)
        lowest_N = torch.full_like(zero_N, torch.finfo(zero_N.dtype).min)  # a block may be minus infinity throughout
        return cls(lowest_N, zero_N, zero_N.clone(), zero_N.clone() if entropy else None)

    def add(self, at: slice, z_tv: Tensor, targets_t: Tensor) -> None:
        """targets_t: as columns of z_tv; those outside of it are another block's."""
        top_t = torch.maximum(self.top[at], z_tv.amax(-1))
        shift_t = self.top[at] - top_t
        below_tv = z_tv - top_t[:, None]
        p_tv = below_tv.exp()
        if self.weighted is not None:
            moved_t = (self.weighted[at] + shift_t * self.sum[at]) * shift_t.exp()
            self.weighted[at] = moved_t + below_tv.clamp_(min=NO_PROBABILITY).mul_(p_tv).sum(-1)
        self.sum[at] = self.sum[at] * shift_t.exp() + p_tv.sum(-1)
        self.top[at] = top_t
        column_t, here_t = _columns(targets_t, z_tv.shape[1])
        self.aim[at] = torch.where(here_t, z_tv.gather(1, column_t[:, None])[:, 0], self.aim[at])

    def logp(self) -> Tensor:
        return (self.aim - self.top) - self.sum.log()

    def entropy(self) -> Tensor | None:
        return None if self.weighted is None else self.sum.log() - self.weighted / self.sum


def _columns(targets_t: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """A column for each target, and whether it is the target's: one outside of the block has any column."""
    return targets_t.clamp(0, columns - 1), (targets_t >= 0) & (targets_t < columns)


@dataclass(eq=False)
class _Gradients:
    """By hidden states (N, H), weight (V, H) and bias (V,), of those that need one.

    Those of the hidden states and of the bias are summed in float32 at least.
    """

    of_hidden: Tensor | None
    weight: Tensor | None
    of_bias: Tensor | None

    @classmethod
    def of(cls, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needed: tuple[bool, ...]) -> _Gradients:
        new = torch.empty_like if len(hidden_NH) else torch.zeros_like  # without a token nothing will write it
        return cls(
            torch.empty_like(at_least_float32(hidden_NH)) if needed[0] else None,
            new(weight_VH) if needed[1] else None,
            torch.zeros_like(at_least_float32(bias_V)) if bias_V is not None and needed[2] else None,
        )

    def add(self, chunk: slice, block: slice, grad_nv: Tensor, hidden_nH: Tensor, weight_vH: Tensor) -> None:
        """beta 0: what is there is not read."""
        if self.of_hidden is not None:
            part_nH = self.of_hidden[chunk]
            if part_nH.dtype == grad_nv.dtype:
                part_nH.addmm_(grad_nv, weight_vH, beta=0.0 if block.start == 0 else 1.0)
            elif block.start == 0:
                part_nH.copy_(grad_nv @ weight_vH)
            else:
                part_nH += grad_nv @ weight_vH
        if self.weight is not None:
            self.weight[block].addmm_(grad_nv.t(), hidden_nH, beta=0.0 if chunk.start == 0 else 1.0)
        if self.of_bias is not None:
            self.of_bias[block] += grad_nv.sum(0, dtype=self.of_bias.dtype)

    def hidden(self, like_NH: Tensor) -> Tensor | None:
        return None if self.of_hidden is None else self.of_hidden.to(like_NH.dtype)

    def bias(self, like_V: Tensor | None) -> Tensor | None:
        return None if self.of_bias is None or like_V is None else self.of_bias.to(like_V.dtype)


def _logprobs(logits_tv: Tensor, top_t: Tensor, log_sum_t: Tensor, temperature: float) -> Tensor:
    """(t, v) log p, in float32 at least; written over the logits where they are that wide."""
    z_tv = _scaled(logits_tv, temperature)
    return torch.sub(z_tv, top_t[:, None], out=z_tv).sub_(log_sum_t[:, None])


def _by_logits(
    logp_tv: Tensor,
    targets_t: Tensor,
    by_logp_t: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
) -> Tensor:
    """(t, v) gradient by the logits, written over log p.  of_entropy: the gradient by the entropy, and the entropy."""
    by_logp_t1 = by_logp_t[:, None] / temperature
    if of_entropy is None:
        grad_tv = logp_tv.exp_().mul_(-by_logp_t1)
    else:
        by_entropy_t1, entropy_t1 = (x_t[:, None] for x_t in of_entropy)
        by_entropy_t1 = by_entropy_t1 / temperature
        p_tv = logp_tv.exp()
        factor_tv = logp_tv.clamp_(min=NO_PROBABILITY).mul_(by_entropy_t1).add_(by_logp_t1 + by_entropy_t1 * entropy_t1)
        grad_tv = factor_tv.neg_().mul_(p_tv)
    column_t, here_t = _columns(targets_t, grad_tv.shape[1])
    added_t1 = torch.where(here_t[:, None], by_logp_t1.to(grad_tv), 0.0)
    return grad_tv.scatter_add_(1, column_t[:, None], added_t1)


def _blocks(count: int, vocabulary: int, how: _Pass) -> Iterator[tuple[slice, slice]]:
    """Chunks of tokens, and in each the blocks of the vocabulary."""
    for chunk in _slices(count, how.rows):
        for block in _slices(vocabulary, how.columns):
            yield chunk, block


def _room(kept: Tensor | None, scratch: Tensor, chunk: slice, block: slice, vocabulary: int) -> Tensor:
    """(n, v), contiguous, where a block's logits are written: its own part of what is kept, or all of `scratch`."""
    n, v = chunk.stop - chunk.start, block.stop - block.start
    if kept is None:
        return scratch[: n * v].view(n, v)
    start = chunk.start * vocabulary + n * block.start
    return kept[start : start + n * v].view(n, v)


def _logits(hidden_nH: Tensor, weight_vH: Tensor, bias_v: Tensor | None, out_nv: Tensor) -> Tensor:
    if bias_v is None:
        return torch.mm(hidden_nH, weight_vH.t(), out=out_nv)
    return torch.addmm(bias_v, hidden_nH, weight_vH.t(), out=out_nv)


def _scaled(logits_tv: Tensor, temperature: float) -> Tensor:
    """In float32 at least; the logits themselves where there is nothing to do."""
    wide_tv = at_least_float32(logits_tv)
    return wide_tv if temperature == 1.0 else wide_tv / temperature


def _slices(count: int, rows: int) -> Iterator[slice]:
    for start in range(0, count, max(rows, 1)):
        yield slice(start, min(start + rows, count))


def _tiles(logits_nv: Tensor) -> Iterator[slice]:
    row_bytes = 4 * max(logits_nv.shape[1], 1)
    limit = TILE_BYTES.get(logits_nv.device.type, WIDE_TILE_BYTES)
    return _slices(len(logits_nv), max(limit // row_bytes, 1))
