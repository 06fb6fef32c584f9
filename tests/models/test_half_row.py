"""Attention of a packed row in bfloat16 on a CPU: every token's gradients are those of float64, rounded once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tutelage.models import half_attention, half_row
from tutelage.models.attention import attention
from tutelage.models.prefix import NO_PREFIX, Segments

SCALE = 0.3
ROWS = {
    "one segment": ((37,), (NO_PREFIX,)),
    "one token": ((1, 1), (NO_PREFIX, NO_PREFIX)),
    "alone, of several lengths": ((5, 40, 33, 40, 1, 0), (NO_PREFIX,) * 6),
    "a prompt and its responses": ((21, 16, 13, 16, 3), (NO_PREFIX, 0, 0, 0, 0)),
    "two prompts": ((5, 7, 33, 8, 7, 40), (NO_PREFIX, 0, NO_PREFIX, 0, 0, 2)),
    "an empty response": ((5, 0, 4), (NO_PREFIX, 0, 0)),
}


def inputs(count: int, h: int = 6, g: int = 2, size: int = 16, values: int = 24) -> list[Tensor]:
    """As a model makes them: token by token, seen as heads."""
    draw = torch.Generator().manual_seed(count)
    sizes = ((h, size, 2.0), (g, size, 1.0), (g, values, 1.0), (h, values, 1.0))
    made = [(torch.randn(1, count, heads, n, generator=draw) * wide).bfloat16() for heads, n, wide in sizes]
    return [x.transpose(1, 2).requires_grad_(True) for x in made[:3]] + [made[3]]


def exact(given: list[Tensor], lens: tuple[int, ...], prefixes: tuple[int, ...]) -> list[Tensor]:
    """By autograd in float64, one query and head at a time: the output (1, N, h, E), then the gradients."""
    q, k, v = (x.detach().double().requires_grad_() for x in given[:3])
    shared = q.shape[1] // k.shape[1]
    starts, tokens = [0, *itertools.accumulate(lens)], []
    for at, size in enumerate(lens):
        before = [] if prefixes[at] == NO_PREFIX else list(range(starts[prefixes[at]], starts[prefixes[at] + 1]))
        for place in range(starts[at], starts[at] + size):
            seen = [*before, *range(starts[at], place + 1)]
            heads = []
            for head in range(q.shape[1]):
                p = torch.softmax(k[0, head // shared, seen] @ q[0, head, place] * SCALE, dim=0)
                heads.append(p @ v[0, head // shared, seen])
            tokens.append(torch.stack(heads))
    out = torch.stack(tokens)[None]
    out.backward(given[3].double())
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def ours(given: list[Tensor], lens: tuple[int, ...], prefixes: tuple[int, ...]) -> list[Tensor]:
    """Through the attention that models call."""
    module = torch.nn.Module()
    if set(prefixes) == {NO_PREFIX}:
        edges = torch.tensor([0, *itertools.accumulate(lens)])
        out, _ = attention(module, *given[:3], scaling=SCALE, cu_seq_lens_q=edges)
    else:
        out, _ = attention(module, *given[:3], scaling=SCALE, shared_prompts=Segments(lens, prefixes))
    out.backward(given[3])
    return [out.detach(), *(x.grad for x in given[:3] if x.grad is not None)]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("small", [True, False])
def test_gradients_are_exact_ones_rounded_once(row: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, prefixes = ROWS[row]
    half_row.batches.cache_clear()
    monkeypatch.setattr(half_row, "BATCH_BYTES", 20_000 if small else half_row.BATCH_BYTES)
    monkeypatch.setattr(half_attention, "SCORE_BYTES", 1 if small else half_attention.SCORE_BYTES)
    monkeypatch.setattr(half_attention, "FEWEST_QUERIES", 16)
    given = inputs(sum(lens))
    wanted, found = exact(given, lens, prefixes), ours(given, lens, prefixes)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=2**-6, atol=2**-6)
    for ours_x, exact_x in zip(found[1:], wanted[1:], strict=True):
        assert ours_x.dtype == torch.bfloat16
        torch.testing.assert_close(ours_x.double(), exact_x, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("most_keys", [1, 150, 10**6])
def test_every_token_is_in_one_batch_once_with_its_own_prompt(row: str, most_keys: int) -> None:
    lens, prefixes = ROWS[row]
    starts, seen = [0, *itertools.accumulate(lens)], []
    segment_of = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).tolist()
    for batch in half_row.batches(lens, prefixes, most_keys):
        tokens = batch.index if batch.real is None else batch.index[batch.real]
        seen += tokens.reshape(-1).tolist()
        for segment in {segment_of[t] for t in tokens.reshape(-1).tolist()}:
            prefix = prefixes[segment]
            prompt = [] if prefix == NO_PREFIX else list(range(starts[prefix], starts[prefix + 1]))
            assert batch.prompt.tolist() == prompt
        rows = batch.index.shape[0]
        assert rows == 1 or rows * (batch.index.shape[1] + len(batch.prompt)) <= most_keys
        if batch.real is not None:
            assert float(batch.real.double().mean(1).min()) >= half_row.SHORTEST
    assert sorted(seen) == list(range(sum(lens)))


def test_responses_of_one_prompt_and_about_one_length_are_one_batch() -> None:
    lens, prefixes = (21, 16, 13, 16, 3), (NO_PREFIX, 0, 0, 0, 0)
    assert sorted(batch.index.shape for batch in half_row.batches(lens, prefixes, 10**6)) == [(1, 3), (1, 21), (3, 16)]


def test_a_window_that_hides_something_is_computed_segment_by_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], half_row.row_attention
    monkeypatch.setattr(half_row, "row_attention", lambda *given: (seen.append(1), real(*given))[1])
    edges = torch.tensor([0, 9, 21])
    for window, fits in ((12, True), (11, False), (None, True)):
        seen.clear()
        given = inputs(21, values=16)
        attention(torch.nn.Module(), *given[:3], cu_seq_lens_q=edges, sliding_window=window)
        assert bool(seen) is fits
