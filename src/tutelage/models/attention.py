"""The "tutelage" attention of transformers models: packed segments without padding, or a paged KV cache.

Shapes: B rows, Q queries, L cached keys, N packed tokens, D head size, h query heads, g key/value heads.

The mode is chosen by a keyword argument given to `model(...)`, which transformers hands down to every attention layer:

    cu_seq_lens_q (n + 1,) integers, first 0, last N: the input is one row (1, N) of n segments. A token attends
        inside its segment only: to itself and what is before it in decoders, to all of it in encoders.
    shared_prompts: one row of segments of which several may look at one and the same prompt (`prefix`); causal.
    token_cut: the input is this rank's part of one packed row that is cut over ranks (`parallel.tokens`).
    paged_step: a step of batched decoding over pages of keys and values, those of a prompt shared (`decoding`).

A call with none of them is refused: plain causal attention over a packed row would leak from one segment into the next
and give plausible, wrong numbers. For the same reason the transformers mask argument is refused, never ignored.
"""

from __future__ import annotations

import importlib.util
import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tutelage.errors import ModelError
from tutelage.models import half_attention, half_row
from tutelage.models.decoding import PagedStep, paged_attention
from tutelage.models.parallel.ring import ring_attention
from tutelage.models.parallel.tokens import Pieces, TokenCut
from tutelage.models.prefix import NO_PREFIX, Segments

NAME = "tutelage"

SHARED_QUERIES = 256
"""Queries of a response that are computed at once after a shared prompt: the mask hides half of so many keys."""

_NOT_IMPLEMENTED = {
    "s_aux": "attention sinks",
    "position_bias": "a learned position bias",
    "head_mask": "a head mask",
    "cache": "a paged cache",
}


def register() -> None:
    """Make `attn_implementation="tutelage"` known to transformers. Doing it again changes nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)


def no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """The mask function of this attention: none is built. Raises ModelError when the caller passed a mask."""
    if attention_mask is not None:
        raise ModelError(
            f"the packed attention was called with an attention mask of shape {tuple(attention_mask.shape)}",
            fix="run the model through tutelage.models.forward or the rollout engine",
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    token_cut: TokenCut | None = None,
    paged_step: PagedStep | None = None,
    shared_prompts: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (B, h, Q, D), key and value (B, g, L, D) -> (B, Q, h, D), softmax(q k / sqrt(D)) v in one of the modes.

    sliding_window W: a query looks at keys less than W positions away. softcap c: scores become c tanh(score / c).
    Raises ModelError for dropout, a mask, attention sinks, a position bias, and for a call in no mode or in several.
    """
    _refuse_what_is_not_implemented(attention_mask, dropout, kwargs)
    _require_one_mode(cu_seq_lens_q, token_cut, paged_step, shared_prompts)
    if paged_step is not None:
        return paged_attention(query, key, value, paged_step, scaling, sliding_window, softcap), None
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ModelError(
            f"packed attention over queries {tuple(query.shape)} and keys {tuple(key.shape)}",
            fix="packed segments are one row, without a KV cache (use_cache=False) and without cross-attention",
        )
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    if token_cut is not None:
        return _cut(query, key, value, token_cut, scaling, causal, sliding_window, softcap), None
    if shared_prompts is not None:
        if not causal:
            raise ModelError(
                "prompts are shared in attention that is not causal",
                fix="pack each sequence whole: a prompt token would have to see every response",
            )
        return _shared(query, key, value, shared_prompts, scaling, sliding_window, softcap), None
    assert cu_seq_lens_q is not None
    return _packed(query, key, value, cu_seq_lens_q, scaling, causal, sliding_window, softcap), None


def _require_one_mode(*modes: object) -> None:
    count = sum(mode is not None for mode in modes)
    if count != 1:
        raise ModelError(
            "the packed attention needs exactly one of cu_seq_lens_q (packed segments), "
            "token_cut (a row cut over ranks), paged_step (decoding over pages), shared_prompts (segments with one "
            f"prompt), got {('neither', '', 'both')[min(count, 2)]}",
            fix='run the model through tutelage.models.forward, or call model.set_attn_implementation("sdpa") first',
        )


def _refuse_what_is_not_implemented(attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None:
        no_mask(attention_mask=attention_mask)
    if dropout:
        raise ModelError(f"attention dropout is {dropout}", fix="call tutelage.models.dropout.disable_dropout(model)")
    for name, what in _NOT_IMPLEMENTED.items():
        if kwargs.get(name) is not None:
            raise ModelError(
                f"this model's attention uses {what} ({name}), which the packed attention does not compute",
                fix="use a model with plain attention",
            )


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    scaling: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """(1, N, h, D): every segment attends to itself."""
    if _flash_varlen_fits(query, value, softcap):
        return _flash_varlen(query, key, value, cu_seq_lens, scaling, causal, window)
    edges = cu_seq_lens.tolist()
    lens = [end - start for start, end in itertools.pairwise(edges)]
    if edges[0] != 0 or edges[-1] != query.shape[2] or min(lens, default=0) < 0:
        raise ModelError(f"segments end at {edges[-1]}, the packed row has {query.shape[2]} tokens")
    if causal and _half_row_fits(query, key, value, max(lens, default=0), window, softcap):
        whole = Segments(tuple(lens), (NO_PREFIX,) * len(lens))
        forward = partial(_packed, cu_seq_lens=cu_seq_lens, scaling=scaling, causal=True, window=None, softcap=None)
        return half_row.row_attention(query, key, value, whole, _scale(query, scaling), forward)
    parts = zip(query.split(lens, 2), key.split(lens, 2), value.split(lens, 2), strict=True)
    outs = [
        _attend(q, k, v, scaling, causal, _window_mask(q.shape[2], window, causal, q.device), softcap)
        for q, k, v in parts
        if q.shape[2]
    ]
    return torch.cat(outs, dim=2).transpose(1, 2)


def _shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """(1, N, h, D): every segment attends to its prefix and, causally, to itself."""
    if sum(segments.lens) != query.shape[2]:
        raise ModelError(f"segments end at {sum(segments.lens)}, the packed row has {query.shape[2]} tokens")
    if _flash_varlen_fits(query, value, softcap):
        index, cu_q, cu_k = segments.keys(query.device)
        # causal FlashAttention aligns the last query with the last key, which is where a segment ends
        return _flash_varlen(query, _taken(key, index), _taken(value, index), cu_q, scaling, True, window, cu_k)
    longest = max((size + segments.prefix_len(at) for at, size in enumerate(segments.lens)), default=0)
    if _half_row_fits(query, key, value, longest, window, softcap):
        forward = partial(_shared, segments=segments, scaling=scaling, window=None, softcap=None)
        return half_row.row_attention(query, key, value, segments, _scale(query, scaling), forward)
    lens = list(segments.lens)
    keys, values, outs = key.split(lens, 2), value.split(lens, 2), []
    for q, k, v, prefix in zip(query.split(lens, 2), keys, values, segments.prefixes, strict=True):
        if not q.shape[2]:
            continue
        if prefix == NO_PREFIX:
            outs.append(_attend(q, k, v, scaling, True, _window_mask(q.shape[2], window, True, q.device), softcap))
            continue
        k, v = torch.cat([keys[prefix], k], dim=2), torch.cat([values[prefix], v], dim=2)
        outs += _after_prefix(q, k, v, scaling, window, softcap)
    return torch.cat(outs, dim=2).transpose(1, 2)


def _half_row_fits(
    query: Tensor, key: Tensor, value: Tensor, longest: int, window: int | None, softcap: float | None
) -> bool:
    """longest: keys that a query may see."""
    return softcap is None and (window is None or longest <= window) and half_attention.fits(query, key, value)


def _scale(query: Tensor, scaling: float | None) -> float:
    return scaling if scaling is not None else query.shape[-1] ** -0.5


def _taken(x: Tensor, index_K: Tensor) -> Tensor:
    """(1, g, K, D): the tokens `index_K`, some of them several times.

    The gradient of a token that is taken several times is added up in float32, in a fixed order.
    """
    _, g, _, size = x.shape
    return embedding(index_K, x[0].transpose(0, 1).flatten(1)).view(-1, g, size).transpose(0, 1)[None]


def _after_prefix(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> list[Tensor]:
    """(1, h, q, D) of runs of queries that end where the keys end; a run computes no scores of keys behind it."""
    end = key.shape[2] - query.shape[2]
    outs = []
    for q in query.tensor_split(-(-query.shape[2] // SHARED_QUERIES), dim=2):
        start, end = end, end + q.shape[2]
        mask = _piece_mask(q.shape[2], end, start, window, True, q.device)
        outs.append(_attend(q, key[:, :, :end], value[:, :, :end], scaling, True, mask, softcap))
    return outs


def _cut(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cut: TokenCut,
    scaling: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """(1, n, h, D): the local tokens of a row that is cut over ranks."""
    scale = _scale(query, scaling)
    if cut.parallel.ring and cut.parallel.context is not None:
        return ring_attention(query, key, value, cut, scale, causal, window, softcap)

    def local(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> Tensor:
        return _attend_pieces(q, k, v, pieces, scale, causal, window, softcap)

    return cut.attend(query, key, value, causal, local)


def _attend_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: Pieces,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """(1, h, m, D): every piece of queries attends to its own keys, shifted by its offset among them."""
    lens = list(zip(pieces.query_lens, pieces.key_lens, pieces.offsets, strict=True))
    if _flash_varlen_fits(query, value, softcap) and (causal or window is None):
        cu_q = torch.tensor([0, *itertools.accumulate(pieces.query_lens)], device=query.device)
        cu_k = torch.tensor([0, *itertools.accumulate(pieces.key_lens)], device=query.device)
        # causal FlashAttention aligns the last query with the last key, which is where a piece ends
        return _flash_varlen(query, key, value, cu_q, scaling, causal, window, cu_k).transpose(1, 2)
    parts = zip(
        query.split(list(pieces.query_lens), 2),
        key.split(list(pieces.key_lens), 2),
        value.split(list(pieces.key_lens), 2),
        (_piece_mask(q, k, offset, window, causal, query.device) for q, k, offset in lens),
        strict=True,
    )
    return torch.cat([_attend(q, k, v, scaling, causal, mask, softcap) for q, k, v, mask in parts], dim=2)


def _piece_mask(
    queries: int, keys: int, offset: int, window: int | None, causal: bool, device: torch.device
) -> Tensor | None:
    """(queries, keys) bool, or None where the causal flag says it all: whole segments; all keys without a window."""
    if queries == keys:
        return _window_mask(keys, window, causal, device)
    if not causal and (window is None or keys <= window):
        return None
    distance = (torch.arange(queries, device=device) + offset)[:, None] - torch.arange(keys, device=device)[None, :]
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return mask if window is None else mask & (distance.abs() < window)


def _window_mask(length: int, window: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """(length, length) bool, or None where the window hides nothing that the causal flag does not hide anyway."""
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window) if causal else distance.abs() < window


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    causal: bool,
    mask: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """(B, h, Q, D). A mask, where given, says everything and the causal flag is not read."""
    if softcap is None and half_attention.fits(query, key, value):
        return half_attention.half_attention(query, key, value, mask, causal, _scale(query, scaling))
    if softcap is None:
        return sdpa(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)).float() * _scale(query, scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1).to(value.dtype) @ value


def _flash_varlen_fits(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1] <= 256
        and softcap is None
        and importlib.util.find_spec("torch.nn.attention.varlen") is not None
    )


def _flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    scaling: float | None,
    causal: bool,
    window: int | None,
    cu_key_lens: Tensor | None = None,
) -> Tensor:
    """The same on a GPU in half precision: one call of torch's variable-length FlashAttention.

    cu_key_lens: of the keys, where segments have other keys than their queries.
    """
    from torch.nn.attention.varlen import varlen_attn

    cu = cu_seq_lens.to(torch.int32)
    longest = int(cu.diff().max())
    cu_key = cu if cu_key_lens is None else cu_key_lens.to(torch.int32)
    before = -1 if window is None else window - 1
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu,
        cu_key,
        longest,
        longest if cu_key_lens is None else int(cu_key.diff().max()),
        scale=scaling,
        window_size=(before, 0 if causal else before),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)
