"""One decode step over pages, against loops in float64 over each row's own keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tutelage.errors import ModelError
from tutelage.models.attention import attention
from tutelage.rollout.inprocess.pages import PageTable

PAGE = 4
PROMPTS = [9, 4, 1]
"""Tokens of each prompt: two full pages and one position, one full page, one position."""
ROWS = [0, 2, 0, 1, 0]
"""Prompt of each row."""
OWN = [6, 5, 4, 1, 1]
"""Own positions of each row, the newest included; a row that begins later has fewer."""


def filled_table() -> PageTable:
    """Rows with their own positions, as a run would have come to them, beside pages that rows have left behind."""
    table = PageTable(40, PAGE)
    gone = table.prefix(6)
    prefixes = [table.prefix(length) for length in PROMPTS]
    table.add([gone], [3])
    gone.held = False
    for step in range(OWN[0]):
        new = [prefixes[p] for p, n in zip(ROWS, OWN, strict=True) if n == OWN[0] - step]
        table.add(new, [9] * len(new))
        table.extend()
        if step == 2:
            table.keep(range(1, len(table)))
        if step < OWN[0] - 1:
            table.advance()
    return table


def pools(table, g, size, dtype):
    """Pools of NaN, with the keys and values of each row's positions where they belong, and those as rows."""
    torch.manual_seed(0)
    key, value = (torch.full((table.pages, g, PAGE, size), torch.nan, dtype=dtype) for _ in range(2))
    for prefix in {id(p): p for p in table._prefixes}.values():
        fill(key, value, prefix.pages, prefix.length)
    for pages, length in zip(table._own, OWN, strict=True):
        fill(key, value, pages, length)
    rows = []
    for prefix, pages, length in zip(table._prefixes, table._own, OWN, strict=True):
        seen = [(prefix.pages[t // PAGE], t % PAGE) for t in range(prefix.length)]
        seen += [(pages[t // PAGE], t % PAGE) for t in range(length)]
        rows.append([(key[page, :, at].double(), value[page, :, at].double()) for page, at in seen])
    return key, value, rows


def fill(key, value, pages, length):
    for t in range(len(pages) * PAGE):
        at = pages[t // PAGE], slice(None), t % PAGE
        key[at] = value[at] = 0.0
        if t < length:
            key[at], value[at] = torch.randn(2, *key.shape[1::2]).to(key.dtype)


def reference(q_hD, row, scale, softcap):
    heads, g = q_hD.shape[0], row[0][0].shape[0]
    out = []
    for head in range(heads):
        kv = head // (heads // g)
        scores = [float(q_hD[head].double() @ k[kv]) * scale for k, _ in row]
        if softcap is not None:
            scores = [softcap * math.tanh(s / softcap) for s in scores]
        weights = [math.exp(s - max(scores)) for s in scores]
        out.append(sum(w / sum(weights) * v[kv] for w, (_, v) in zip(weights, row, strict=True)))
    return torch.stack(out)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("heads", "g"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize(("scale", "softcap"), [(None, None), (0.3, 2.0)])
def test_each_row_sees_its_prompt_and_its_own_positions_and_nothing_else(heads, g, dtype, atol, scale, softcap):
    """Everything else in the pool is NaN: pages of nobody, positions after a row's last one."""
    size = 8
    table = filled_table()
    key, value, rows = pools(table, g, size, dtype)
    query = torch.randn(len(ROWS), heads, 1, size).to(dtype)
    prompt_lens = torch.tensor([PROMPTS[p] for p in ROWS])
    step = table.layout(torch.device("cpu")).at(prompt_lens, torch.tensor(OWN) - 1, PAGE, table.longest)
    out, _ = attention(nn.Module(), query, key, value, scaling=scale, softcap=softcap, paged_step=step)
    assert out.shape == (len(ROWS), 1, heads, size)
    assert out.dtype == dtype
    for b, row in enumerate(rows):
        want = reference(query[b, :, 0], row, size**-0.5 if scale is None else scale, softcap)
        torch.testing.assert_close(out[b, 0].double(), want, atol=atol, rtol=0)
    pages = [pages[(n - 1) // PAGE] for pages, n in zip(table._own, OWN, strict=True)]
    assert step.write_page.tolist() == pages
    assert step.write_at.tolist() == [(n - 1) % PAGE for n in OWN]


def test_autocast_does_not_lower_the_precision_of_float32_pages():
    table = filled_table()
    key, value, rows = pools(table, 2, 8, torch.float32)
    query = torch.randn(len(ROWS), 2, 1, 8)
    prompt_lens = torch.tensor([PROMPTS[p] for p in ROWS])
    step = table.layout(torch.device("cpu")).at(prompt_lens, torch.tensor(OWN) - 1, PAGE, table.longest)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = attention(nn.Module(), query, key, value, paged_step=step)
    torch.testing.assert_close(out[3, 0].double(), reference(query[3, :, 0], rows[3], 8**-0.5, None), atol=1e-6, rtol=0)


def test_a_row_that_has_outgrown_the_sliding_window_is_refused():
    table = filled_table()
    key, value, _ = pools(table, 2, 8, torch.float32)
    query = torch.randn(len(ROWS), 2, 1, 8)
    prompt_lens = torch.tensor([PROMPTS[p] for p in ROWS])
    step = table.layout(torch.device("cpu")).at(prompt_lens, torch.tensor(OWN) - 1, PAGE, 15)
    attention(nn.Module(), query, key, value, sliding_window=15, paged_step=step)
    with pytest.raises(ModelError, match="15 positions through a sliding window of 14"):
        attention(nn.Module(), query, key, value, sliding_window=14, paged_step=step)


def test_a_call_in_two_modes_is_refused():
    step = filled_table()
    with pytest.raises(ModelError, match="both"):
        attention(nn.Module(), *torch.randn(3, 1, 2, 1, 8), cu_seq_lens_q=torch.tensor([0, 1]), paged_step=step)
