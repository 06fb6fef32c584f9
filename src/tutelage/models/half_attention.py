"""Attention in half precision on a CPU, with a backward pass in float32.

Shapes: h query heads, g key/value heads, r = h / g, Q queries, L keys, q queries of a run, K its keys with padding,
D head size of queries and keys, E that of values.

torch's fused attention has a fast forward pass there; its backward pass in bfloat16 is slower than that in float32, and
rounds every partial sum.  Here the backward pass is products of matrices in float32, run by run of queries, from
queries, keys and values alone (docs/decisions.md):

    s = scale q k^T + b        p = softmax(s)        dv = p^T do
    dp = do v^T                ds = p (dp - sum_L p dp)        dq = scale ds k        dk = scale ds^T q

b is 0 where a query looks at a key, else minus infinity.  A run has about SCORE_BYTES of scores, of the keys that its
last query sees, and is padded to a multiple of 16 keys: a product whose rows are of another length is up to four times
as slow.  (FlashAttention, arXiv:2205.14135, has the same recomputation in smaller tiles.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention as sdpa

SCORE_BYTES = 3 * 2**19
FEWEST_QUERIES = 32
"""Of a run, however many keys there are."""
ALIGNED = 16


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the backward pass of this call is better done here: half precision on a CPU, with a gradient to come."""
    half = query.dtype in (torch.float16, torch.bfloat16) and query.device.type == "cpu"
    learns = query.requires_grad or key.requires_grad or value.requires_grad
    return half and learns and torch.is_grad_enabled() and query.shape[0] == 1 and query.numel() > 0


def half_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """query (1, h, Q, D), key (1, g, L, D), value (1, g, L, E) -> (1, h, Q, E).

    mask (Q, L) bool, true where a query looks at a key; where given it says everything.  causal: query i sees keys
    0 .. i, and Q = L.
    """
    found: Tensor = _HalfAttention.apply(query, key, value, mask, causal and mask is None, scale)
    return found


class _HalfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.causal, ctx.scale = causal, scale
        grouped = query.shape[1] != key.shape[1]
        return sdpa(query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        _, h, count, _ = query.shape
        g, keys = key.shape[1], key.shape[2]
        width = -(-keys // ALIGNED) * ALIGNED
        k_gKD, v_gKE = _padded(key[0], width), _padded(value[0], width)
        dk_gKD, dv_gKE = torch.zeros_like(k_gKD), torch.zeros_like(v_gKE)
        dq_hQD = torch.empty_like(query[0])
        run = queries_of_a_run(count, 4 * h * width)
        for start in range(0, count, run):
            end = min(count, start + run)
            seen = min(width, -(-end // ALIGNED) * ALIGNED) if ctx.causal else width
            bias_qK = _bias(start, end, keys, seen, mask, ctx.causal)
            q_gD, do_gE = _by_group(query[0, :, start:end], g), _by_group(grad[0, :, start:end], g)
            found = run_gradients(q_gD, k_gKD[:, :seen], v_gKE[:, :seen], do_gE, bias_qK, ctx.scale)
            dq_hQD[:, start:end] = found[0].view(h, end - start, -1)
            dk_gKD[:, :seen] += found[1]
            dv_gKE[:, :seen] += found[2]
        dk, dv = dk_gKD[None, :, :keys].to(key.dtype), dv_gKE[None, :, :keys].to(value.dtype)
        return dq_hQD[None], dk, dv, None, None, None


def run_gradients(
    q_gD: Tensor, k_gKD: Tensor, v_gKE: Tensor, do_gE: Tensor, bias_qK: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (g, r q, D), dk (g, K, D), dv (g, K, E) of one run; its queries are those of a group's heads.

    bias_qK (q, K) where they are given head after head; or (r q, K).
    """
    s = torch.bmm(q_gD, k_gKD.transpose(1, 2))
    by_query = s.view(-1, *bias_qK.shape)
    torch.add(bias_qK, by_query, alpha=scale, out=by_query)
    p = s.softmax(dim=-1)
    dp = torch.bmm(do_gE, v_gKE.transpose(1, 2))
    dv = torch.bmm(p.transpose(1, 2), do_gE)
    ds = torch._softmax_backward_data(dp, p, -1, torch.float32)
    return torch.bmm(ds, k_gKD).mul_(scale), torch.bmm(ds.transpose(1, 2), q_gD).mul_(scale), dv


def queries_of_a_run(count: int, row_bytes: int) -> int:
    """The queries in runs of about one size, whole multiples of ALIGNED, of at most SCORE_BYTES where that can be."""
    runs = -(-count // max(FEWEST_QUERIES, SCORE_BYTES // row_bytes))
    return -(-count // (runs * ALIGNED)) * ALIGNED


def _bias(start: int, end: int, keys: int, seen: int, mask: Tensor | None, causal: bool) -> Tensor:
    """(q, K) float32: 0 where one of the queries `start` .. `end` - 1 looks at a key, else minus infinity."""
    bias_qK = torch.zeros((end - start, seen))
    if causal:
        return bias_qK.masked_fill_(torch.arange(seen) > torch.arange(start, end)[:, None], -torch.inf)
    if mask is not None:
        bias_qK[:, :keys].masked_fill_(~mask[start:end], -torch.inf)
    bias_qK[:, keys:] = -torch.inf
    return bias_qK


def _padded(x_gLD: Tensor, width: int) -> Tensor:
    """(g, width, D) float32, 0 behind the keys."""
    g, keys, size = x_gLD.shape
    found = torch.empty((g, width, size))
    found[:, :keys] = x_gLD
    found[:, keys:] = 0.0
    return found


def _by_group(x_hqD: Tensor, g: int) -> Tensor:
    """(g, r q, D) float32."""
    h, q, size = x_hqD.shape
    return x_hqD.reshape(g, h // g * q, size).float()
