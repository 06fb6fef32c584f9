"""Attention of one decode step over a paged key/value cache in which rows share the pages of their prompt.

Shapes: b rows (one new token each), P prompts, M lanes (the most rows of one prompt), X pages of a layer's pool, z
positions of a page, K pages of the shared span, O pages of the own span, J pages of the longest prompt, I pages of the
longest own part, h query heads, g key/value heads, r = h / g, D head size, W = (J + I) z columns.

A row attends to the pages of its prompt, which all rows of that prompt share, and to its own.  A prompt's page is read
once for all its rows.  The scores of both parts stand side by side before one softmax, so nothing is merged later:

    out_b = sum_w softmax_w(scale q_b . k_w) v_w      over the w that stand before row b's token, and the token itself

The number of tensor operations does not depend on rows, pages or lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tutelage.errors import ModelError
from tutelage.native import ops


@dataclass(frozen=True, eq=False)
class PagedStep:
    """Which pages each row looks at; int64 tensors, all on one device but where said.

    shared   K: pages 0 .. K - 1 of the pool hold every shared page (and may hold others, which nobody reads).
    own      pages own .. X - 1 hold every row's own page (and may hold others).
    longest  positions of the longest row, its new token included.

    dense    whether `rows` counts 0 .. b - 1 in order: every prompt has all M of its rows.
    rows             (P, M) rows of each prompt; empty lanes name any row.
    lane_of_row      (b,) prompt * M + lane: where a row stands in `rows`.
    prompt_of_page   (K,) prompt of a shared page;  place_of_page (K,): prompt * J + its number among the pages there.
    pages_of_prompt  (P, J) shared pages in order;  shared_bag: without blanks;  shared_starts (P,): where each begins.
    row_of_own       (O,) row of an own page;  place_of_own (O,): row * I + its number among the row's pages.
    own_of_row       (b, I) own pages in order;  own_bag: without blanks;  own_starts (b,): where each row begins.
    hidden           (b, 1, W) float32: minus infinity in columns at which the row has no key, else 0.
    write_page       (b,) and write_at (b,): page, and position in it, where the new keys and values go.
    prompt_lens      (b,) positions of the shared part;  own_lens (b,): own positions before the new token.

    Own pages are counted from `own`, but for `write_page`.
    Blanks name a page of the same prompt or row, so that only finite numbers are hidden.  Pages that nobody reads
    name any prompt or row: their sums are in no bag.
    """

    shared: int
    own: int
    longest: int
    dense: bool
    rows: Tensor
    lane_of_row: Tensor
    prompt_of_page: Tensor
    place_of_page: Tensor
    pages_of_prompt: Tensor
    shared_bag: Tensor
    shared_starts: Tensor
    row_of_own: Tensor
    place_of_own: Tensor
    own_of_row: Tensor
    own_bag: Tensor
    own_starts: Tensor
    hidden: Tensor
    write_page: Tensor
    write_at: Tensor
    prompt_lens: Tensor
    own_lens: Tensor

    def to(self, device: torch.device) -> PagedStep:
        """On another device, in one transfer of all index tensors."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: t for name, t in named.items() if isinstance(t, Tensor) and t.dtype == torch.int64}
        if all(t.device == device for t in tensors.values()):
            return self
        flat = torch.cat([t.reshape(-1) for t in tensors.values()]).to(device)
        parts = flat.split([t.numel() for t in tensors.values()])
        moved: dict[str, Any] = {n: p.view(t.shape) for (n, t), p in zip(tensors.items(), parts, strict=True)}
        return replace(self, **moved, hidden=self.hidden.to(device))

    def at(self, prompt_lens: Tensor, own_lens: Tensor, page: int, longest: int) -> PagedStep:
        """The same pages when each row has `own_lens` (b,) own positions before its new token; no transfer.

        prompt_lens (b,): positions of its prompt.  page: positions of a page.
        """
        shared = torch.arange(self.pages_of_prompt.shape[1] * page, device=own_lens.device) >= prompt_lens[:, None]
        own = torch.arange(self.own_of_row.shape[1] * page, device=own_lens.device) > own_lens[:, None]
        columns = torch.cat([shared, own], dim=1)[:, None]
        hidden = torch.zeros(columns.shape, device=own_lens.device).masked_fill_(columns, -torch.inf)
        lengths = replace(self, prompt_lens=prompt_lens, own_lens=own_lens, longest=longest)
        return replace(lengths, hidden=hidden, write_at=own_lens % page)


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: PagedStep,
    scaling: float | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """query (b, h, 1, D), key and value pools (X, g, z, D) -> (b, 1, h, D), computed in float32 at least.

    Half precision on a GPU multiplies in half precision and adds in float32.
    Raises ModelError for a sliding window that some row has outgrown.
    """
    if sliding_window is not None and step.longest > sliding_window:
        raise ModelError(
            f"decoding {step.longest} positions through a sliding window of {sliding_window}",
            fix="keep prompt and response together within the window, or use a model without one",
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if _native_fits(query, key, value, softcap):
        return _native(query, key, value, step, scale, softcap)
    with torch.autocast(query.device.type, enabled=False):
        wide = product_dtype(query)
        scores_bhW = _scores(query[:, :, 0].to(wide), key, step, scale, softcap)
        p_bhW = scores_bhW.softmax(dim=-1)
        return _weighted(p_bhW.to(wide), value, step).to(query.dtype)[:, None]


def _native_fits(query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Whether the compiled kernels take them: values as wide as keys, in pools that lie as they were allocated.

    Not so where a layer caches something else and makes keys and values of the pools (multi-head latent attention).
    """
    pools = key.shape == value.shape and key.is_contiguous() and value.is_contiguous()
    alike = pools and query.shape[-1] == key.shape[-1] and (softcap is None or softcap > 0)
    return alike and ops.takes(query, key, value)


def _native(query: Tensor, key: Tensor, value: Tensor, step: PagedStep, scale: float, softcap: float | None) -> Tensor:
    """Row by row over exactly the pages it reads, in float32."""
    return ops.paged_attention(
        query,
        key,
        value,
        pages_of_prompt=step.pages_of_prompt,
        own_of_row=step.own_of_row,
        lane_of_row=step.lane_of_row,
        prompt_lens=step.prompt_lens,
        own_lens=step.own_lens,
        own=step.own,
        lanes=step.rows.shape[1],
        scale=scale,
        softcap=softcap or 0.0,
    )


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that products are computed in: half precision only where the device adds it up in float32."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and not x.is_cuda else x.dtype


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(n, p, q) @ (n, q, s) in float32 at least."""
    if a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b)


def _scores(q_bhD: Tensor, key: Tensor, step: PagedStep, scale: float, softcap: float | None) -> Tensor:
    """(b, h, W): q . k of every row with its prompt's pages, then its own; minus infinity where there is no key."""
    b, h, size = q_bhD.shape
    _, g, z, _ = key.shape
    prompts, lanes = step.rows.shape
    flat_b = q_bhD.reshape(b, -1)
    lanes_PM = flat_b if step.dense else flat_b.index_select(0, step.rows.view(-1))
    lanes_P = lanes_PM.view(prompts, lanes, g, h // g, size).transpose(1, 2).reshape(prompts, -1)
    q_K = lanes_P.index_select(0, step.prompt_of_page).view(-1, lanes * (h // g), size)
    s_K = _product(q_K, _span(key, 0, step.shared, q_K.dtype).transpose(1, 2)).view(step.shared, -1)
    s_P = s_K.index_select(0, step.pages_of_prompt.view(-1)).view(prompts, -1, g, lanes, h // g, z)
    s_b = s_P.permute(0, 3, 2, 4, 1, 5).reshape(prompts * lanes, -1)
    shared = s_b if step.dense else s_b.index_select(0, step.lane_of_row)

    q_O = flat_b.index_select(0, step.row_of_own).view(-1, h // g, size)
    s_O = _product(q_O, _span(key, step.own, key.shape[0], q_O.dtype).transpose(1, 2)).view(-1, h * z)
    own = s_O.index_select(0, step.own_of_row.view(-1)).view(b, -1, h, z).transpose(1, 2)

    width = step.pages_of_prompt.shape[1] * z
    out_bhW = s_O.new_empty((b, h, step.hidden.shape[-1]))
    own_hidden = step.hidden[:, :, width:].view(b, 1, -1, z)
    parts = (
        (shared.view(b, h, -1), out_bhW[:, :, :width], step.hidden[:, :, :width]),
        (own, out_bhW[:, :, width:].view(b, h, -1, z), own_hidden),
    )
    for scores, place, hidden in parts:
        if softcap is not None:
            scores = softcap * torch.tanh(scores * (scale / softcap))
        torch.add(hidden, scores, alpha=scale if softcap is None else 1.0, out=place)
    return out_bhW


def _weighted(p_bhW: Tensor, value: Tensor, step: PagedStep) -> Tensor:
    """(b, h, D): the values of a row's pages, weighted and added up."""
    b, h, _ = p_bhW.shape
    _, g, z, size = value.shape
    prompts, lanes = step.rows.shape
    width = step.pages_of_prompt.shape[1] * z
    height = lanes * (h // g)
    p_PM = p_bhW if step.dense else p_bhW.index_select(0, step.rows.view(-1))
    p_PM = p_PM.view(prompts, lanes, g, h // g, -1)[..., :width].unflatten(-1, (-1, z))
    p_K = p_PM.permute(0, 4, 2, 1, 3, 5).reshape(-1, g * height * z).index_select(0, step.place_of_page)
    o_K = _product(p_K.view(-1, height, z), _span(value, 0, step.shared, p_K.dtype)).view(step.shared, -1)
    o_P = embedding_bag(step.shared_bag, o_K, step.shared_starts, mode="sum").view(prompts, g, lanes, -1)
    o_b = o_P.transpose(1, 2).reshape(prompts * lanes, h * size)
    shared = o_b if step.dense else o_b.index_select(0, step.lane_of_row)

    p_bI = p_bhW[:, :, width:].unflatten(-1, (-1, z)).transpose(1, 2).reshape(-1, h * z)
    p_O = p_bI.index_select(0, step.place_of_own).view(-1, h // g, z)
    o_O = _product(p_O, _span(value, step.own, value.shape[0], p_O.dtype)).view(-1, h * size)
    own = embedding_bag(step.own_bag, o_O, step.own_starts, mode="sum")
    return (own + shared).view(b, h, size)


def _span(pool: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """(pages * g, z, D): pages first .. last - 1 of the pool, as a view where the dtype is the pool's."""
    return pool[first:last].to(dtype).flatten(0, 1)
