"""Attention of a whole packed row in half precision on a CPU, with a backward pass in float32.

Shapes: h query heads, g key/value heads, r = h / g, N tokens of the row, D head size of queries and keys, E of values,
S segments that are computed together, T tokens of the longest, P tokens of their prompt, W = P + T keys, each padded.

The forward pass is torch's, segment by segment.  The backward pass has the products of `half_attention`, for several
segments of about one length at once, those of one prompt together: a batch of S g products keeps all threads at work,
where one segment has g.  A shorter segment is padded with any token: behind the queries of its own it is hidden by
causality, and its own queries have no gradient.  Every token's keys and values get their gradients in float32, its own
segment's and those of the responses after it, and are rounded once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tutelage.models.half_attention import ALIGNED, queries_of_a_run, run_gradients
from tutelage.models.prefix import NO_PREFIX, Segments

BATCH_BYTES = 32 << 20
"""Of the keys, values and their gradients of one batch, at most; one segment may have more."""
SHORTEST = 0.75
"""Of the longest segment's tokens has the shortest of a batch at least: what is padded is computed."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """index (S, T) token of the row; real (S, T) bool: not padding, None where there is none.

    prompt (P,) tokens of the prompt that all of them have, maybe none.
    """

    index: Tensor
    real: Tensor | None
    prompt: Tensor


def row_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, forward: Forward
) -> Tensor:
    """query (1, h, N, D), key (1, g, N, D), value (1, g, N, E) -> (1, N, h, E): each segment looks at its prefix and,
    causally, at itself.

    forward  computes the same, (1, N, h, E), without gradient.
    """
    found: Tensor = _HalfRow.apply(query, key, value, segments, scale, forward)
    return found


class _HalfRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, forward: Forward
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.segments, ctx.scale = segments, scale
        return forward(query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        q_NhD, k_NgD, v_NgE = (x[0].transpose(0, 1) for x in (query, key, value))
        dq_NhD = torch.empty_like(q_NhD, memory_format=torch.contiguous_format)
        dk_NgD, dv_NgE = (torch.zeros(x.shape, dtype=torch.float32) for x in (k_NgD, v_NgE))
        key_bytes = 8 * k_NgD.shape[1] * (k_NgD.shape[2] + v_NgE.shape[2])
        for batch in batches(ctx.segments.lens, ctx.segments.prefixes, max(BATCH_BYTES // key_bytes, 1)):
            dq, dk, dv = _gradients(batch, q_NhD, k_NgD, v_NgE, grad[0], ctx.scale)
            _give(dq_NhD, batch, dq)
            for total, part in ((dk_NgD, dk), (dv_NgE, dv)):
                _add(total, batch, part)
        dq, dk, dv = (x.to(y.dtype).transpose(0, 1)[None] for x, y in ((dq_NhD, query), (dk_NgD, key), (dv_NgE, value)))
        return dq, dk, dv, None, None, None


@lru_cache(maxsize=16)
def batches(lens: tuple[int, ...], prefixes: tuple[int, ...], most_keys: int) -> tuple[Batch, ...]:
    """Every token of the row in one batch, once; of at most `most_keys` keys where there are several segments.

    The layers of a model ask for the same ones.
    """
    starts = [0, *itertools.accumulate(lens)]
    by_prefix: dict[int, list[int]] = {}
    for at in sorted(range(len(lens)), key=lambda at: -lens[at]):
        if lens[at]:
            by_prefix.setdefault(prefixes[at], []).append(at)
    found = []
    for prefix, members in by_prefix.items():
        shared = 0 if prefix == NO_PREFIX else lens[prefix]
        prompt = torch.arange(shared) + (0 if prefix == NO_PREFIX else starts[prefix])
        while members:
            longest = lens[members[0]]
            most = max(most_keys // (_padded(shared) + _padded(longest)), 1)
            chosen = [at for at in members[:most] if lens[at] >= SHORTEST * longest]
            members = members[len(chosen) :]
            found.append(_batch([starts[at] for at in chosen], [lens[at] for at in chosen], prompt))
    return tuple(found)


def _batch(starts: Sequence[int], lens: Sequence[int], prompt: Tensor) -> Batch:
    """lens: the longest first."""
    place_T, lens_S1 = torch.arange(lens[0]), torch.tensor(lens)[:, None]
    index_ST = torch.tensor(starts)[:, None] + torch.minimum(place_T, lens_S1 - 1)
    return Batch(index_ST, place_T < lens_S1 if lens[-1] < lens[0] else None, prompt)


def _gradients(
    batch: Batch, q_NhD: Tensor, k_NgD: Tensor, v_NgE: Tensor, do_NhE: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (S g, T, r, D), dk (S, g, W, D), dv (S, g, W, E)."""
    g, tokens, prompt = k_NgD.shape[1], batch.index.shape[1], _padded(len(batch.prompt))
    q_gTrD, do_gTrE = _by_group(q_NhD, batch, g), _by_group(do_NhE, batch, g, zero=True)
    k_SgWD, v_SgWE = _keys(k_NgD, batch), _keys(v_NgE, batch)
    k_gWD, v_gWE = k_SgWD.flatten(0, 1), v_SgWE.flatten(0, 1)
    dq_gTrD, dk_gWD, dv_gWE = torch.empty_like(q_gTrD), torch.zeros_like(k_gWD), torch.zeros_like(v_gWE)
    groups, r = q_gTrD.shape[0], q_gTrD.shape[2]
    run = queries_of_a_run(tokens, 4 * groups * r * k_gWD.shape[1])
    for start in range(0, tokens, run):
        end = min(tokens, start + run)
        seen = prompt + _padded(end)
        bias_qK = _bias(start, end, len(batch.prompt), prompt, seen).repeat_interleave(r, dim=0)
        q_g, do_g = q_gTrD[:, start:end].flatten(1, 2), do_gTrE[:, start:end].flatten(1, 2)
        dq, dk, dv = run_gradients(q_g, k_gWD[:, :seen], v_gWE[:, :seen], do_g, bias_qK, scale)
        dq_gTrD[:, start:end] = dq.unflatten(1, (-1, r))
        dk_gWD[:, :seen] += dk
        dv_gWE[:, :seen] += dv
    return dq_gTrD, dk_gWD.view_as(k_SgWD), dv_gWE.view_as(v_SgWE)


def _bias(start: int, end: int, prompt: int, padded: int, seen: int) -> Tensor:
    """(q, seen) float32: 0 where one of the queries start .. end - 1 looks at a key, else minus infinity."""
    bias_qK = torch.zeros((end - start, seen))
    bias_qK[:, prompt:padded] = -torch.inf
    behind_qT = torch.arange(seen - padded) > torch.arange(start, end)[:, None]
    bias_qK[:, padded:].masked_fill_(behind_qT, -torch.inf)
    return bias_qK


def _by_group(x_NhD: Tensor, batch: Batch, g: int, zero: bool = False) -> Tensor:
    """(S g, T, r, D) float32; zero: where there is padding."""
    h, size = x_NhD.shape[1:]
    count, tokens = batch.index.shape
    x_SThD = x_NhD.index_select(0, batch.index.view(-1)).view(count, tokens, h, size)
    if zero and batch.real is not None:
        x_SThD.masked_fill_(~batch.real[:, :, None, None], 0.0)
    out = torch.empty((count, g, tokens, h // g, size))
    out.copy_(x_SThD.view(count, tokens, g, h // g, size).transpose(1, 2))
    return out.flatten(0, 1)


def _keys(x_NgD: Tensor, batch: Batch) -> Tensor:
    """(S, g, W, D) float32: those of the prompt, then each segment's own, both padded with 0."""
    g, size = x_NgD.shape[1:]
    (count, tokens), shared = batch.index.shape, len(batch.prompt)
    prompt = _padded(shared)
    out = torch.zeros((count, g, prompt + _padded(tokens), size))
    if shared:
        out[:, :, :shared] = x_NgD.index_select(0, batch.prompt).transpose(0, 1)
    own = x_NgD.index_select(0, batch.index.view(-1)).view(count, tokens, g, size)
    out[:, :, prompt : prompt + tokens] = own.transpose(1, 2)
    return out


def _give(dq_NhD: Tensor, batch: Batch, dq_gTrD: Tensor) -> None:
    """Every token has its queries' gradient from here alone."""
    (count, tokens), (_, h, size) = batch.index.shape, dq_NhD.shape
    dq_SThD = dq_gTrD.view(count, -1, tokens, *dq_gTrD.shape[2:]).transpose(1, 2).reshape(count, tokens, h, size)
    index, rows = _real(batch, dq_SThD)
    dq_NhD.index_copy_(0, index, rows.to(dq_NhD.dtype))


def _add(total_NgD: Tensor, batch: Batch, part_SgWD: Tensor) -> None:
    """What the keys of the prompt and of the segments themselves get."""
    tokens, shared = batch.index.shape[1], len(batch.prompt)
    prompt = _padded(shared)
    if shared:
        total_NgD.index_add_(0, batch.prompt, part_SgWD[:, :, :shared].sum(0).transpose(0, 1))
    index, rows = _real(batch, part_SgWD[:, :, prompt : prompt + tokens].transpose(1, 2))
    total_NgD.index_add_(0, index, rows)


def _real(batch: Batch, x_ST: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that are not padding, and what they have."""
    if batch.real is None:
        return batch.index.view(-1), x_ST.flatten(0, 1)
    return batch.index[batch.real], x_ST[batch.real]


def _padded(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
