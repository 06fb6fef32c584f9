"""Ring attention: keys and values travel round the context ranks while each computes with what it has.

Shapes: h query heads, g key/value heads, m tokens of one context share, D head size, C context ranks.

Step s of C: rank c attends from its own queries to the share of rank c - s, and hands that share on to rank c + 1
(Liu, Zaharia, Abbeel 2023, arXiv:2310.01889).  Parts are joined by the online softmax: with scores S, running maximum
M, sum L and output O, a new block gives M' = max(M, max S), L' = L e^(M - M') + sum e^(S - M'), and O likewise (Milakov
and Gimelshein 2018, arXiv:1805.02867).  The backward pass sends the ring round again, with the gradient of each share
travelling beside it; a rank holds two shares at a time, and scores of (h, m, m).

Scores and sums are in float32 at least.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tutelage.models.parallel.tokens import TokenCut, heads_apart


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cut: TokenCut,
    scaling: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """query (1, h, n, D), key and value (1, g, n, D) -> (1, n, h, D): as `TokenCut.attend`, with a ring of shares."""
    groups = cut.parallel
    assert groups.context is not None
    if groups.sequence is not None:
        query, key, value = heads_apart(query, key, value, groups.sequence)
    blocks = _Blocks(groups.context, *cut.coordinates(), scaling, causal, window, softcap)
    out = _Ring.apply(query[0], key[0], value[0], blocks)
    return cut.tokens_apart(out[None]).transpose(1, 2)


class _Blocks:
    """Scores between this rank's queries and any rank's keys."""

    def __init__(
        self,
        group: ProcessGroup,
        segment_M: Tensor,
        position_M: Tensor,
        scaling: float,
        causal: bool,
        window: int | None,
        softcap: float | None,
    ) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.segments, self.positions = segment_M.chunk(self.ranks), position_M.chunk(self.ranks)
        self.scaling, self.causal, self.window, self.softcap = scaling, causal, window, softcap

    def source(self, step: int) -> int:
        return (self.rank - step) % self.ranks

    def mask(self, source: int) -> Tensor:
        """(m, m) bool: which of rank `source`'s keys the queries here look at."""
        distance = self.positions[self.rank][:, None] - self.positions[source][None, :]
        mask = self.segments[self.rank][:, None] == self.segments[source][None, :]
        if self.causal:
            mask = mask & (distance >= 0)
        return mask if self.window is None else mask & (distance.abs() < self.window)

    def scores(self, query: Tensor, key: Tensor, source: int) -> tuple[Tensor, Tensor | None]:
        """(h, m, m) capped and masked, and the derivative of the cap (None: 1). key has all h heads."""
        raw = (query @ key.transpose(-1, -2)) * self.scaling
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(raw / self.softcap)
            raw, slope = self.softcap * bent, 1 - bent.square()
        return raw.masked_fill(~self.mask(source), -torch.inf), slope

    def passed_on(self, block: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start to send a block to the next rank and to receive the one of the rank before."""
        received = torch.empty_like(block)
        to = dist.get_global_rank(self.group, (self.rank + 1) % self.ranks)
        of = dist.get_global_rank(self.group, (self.rank - 1) % self.ranks)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, block, to, self.group),
                dist.P2POp(dist.irecv, received, of, self.group),
            ]
        )
        return received, works


def _arrived(block: Tensor, works: list[dist.Work]) -> Tensor:
    for work in works:
        work.wait()
    return block


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _for_queries(x: Tensor, heads: int) -> Tensor:
    """(g, m, D) -> (h, m, D): each query head's own key or value head."""
    return _wide(x).repeat_interleave(heads // x.shape[0], 0)


def _for_pairs(grad: Tensor, pairs: int) -> Tensor:
    """(h, m, D) -> (g, m, D): the adjoint of `_for_queries`."""
    return grad.unflatten(0, (pairs, -1)).sum(1)


class _Ring(torch.autograd.Function):
    """query (h, m, D), key and value (g, m, D) -> (h, m, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: _Blocks) -> Tensor:
        heads, wide = query.shape[0], _wide(query)
        top = wide.new_full(query.shape[:2], -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(wide)
        share = torch.stack([key, value]).contiguous()
        for step in range(blocks.ranks):
            coming = blocks.passed_on(share) if step + 1 < blocks.ranks else None
            scores, _ = blocks.scores(wide, _for_queries(share[0], heads), blocks.source(step))
            higher = torch.maximum(top, scores.amax(-1))
            base = torch.where(higher.isinf(), 0.0, higher)  # a query may see nothing of a block
            p = (scores - base[..., None]).exp()
            kept = (top - base).exp()
            total = total * kept + p.sum(-1)
            out = out * kept[..., None] + p @ _for_queries(share[1], heads)
            top = higher
            if coming is not None:
                share = _arrived(*coming)
        out = out / total[..., None]
        ctx.blocks = blocks
        ctx.save_for_backward(query, key, value, out, top + total.log())
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, log_total = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        heads, pairs, wide, grad_out = query.shape[0], key.shape[0], _wide(query), _wide(grads[0])
        grad_query, center = torch.zeros_like(wide), (grad_out * out).sum(-1, keepdim=True)
        share = torch.stack([key, value]).contiguous()
        grad_share = torch.zeros_like(_wide(share))
        for step in range(blocks.ranks):
            coming = blocks.passed_on(share) if step + 1 < blocks.ranks else None
            k, v = _for_queries(share[0], heads), _for_queries(share[1], heads)
            scores, slope = blocks.scores(wide, k, blocks.source(step))
            p = (scores - log_total[..., None]).exp()
            grad_scores = p * (grad_out @ v.transpose(-1, -2) - center) * blocks.scaling
            grad_scores = grad_scores if slope is None else grad_scores * slope
            grad_query += grad_scores @ k
            grad_share[0] += _for_pairs(grad_scores.transpose(-1, -2) @ wide, pairs)
            grad_share[1] += _for_pairs(p.transpose(-1, -2) @ grad_out, pairs)
            # after as many steps as there are ranks, the gradient is back where its share came from
            grad_share = _arrived(*blocks.passed_on(grad_share))
            if coming is not None:
                share = _arrived(*coming)
        return grad_query.to(query.dtype), grad_share[0].to(key.dtype), grad_share[1].to(value.dtype), None
