"""The packed attention against an explicit softmax over a block mask, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tutelage.errors import ModelError
from tutelage.models.attention import attention, no_mask
from tutelage.models.prefix import NO_PREFIX, Segments

LENS = [4, 1, 7, 3]
CU = torch.tensor([0, 4, 5, 12, 15], dtype=torch.int32)


def qkv(heads: int = 4, groups: int = 2, tokens: int = 15, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(1, heads, tokens, size, dtype=torch.float64, requires_grad=True),
        torch.randn(1, groups, tokens, size, dtype=torch.float64, requires_grad=True),
        torch.randn(1, groups, tokens, size, dtype=torch.float64, requires_grad=True),
    )


def reference(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, softcap: float | None = None) -> Tensor:
    """(1, Q, h, D), one query and head at a time."""
    _, heads, queries, size = query.shape
    out = torch.zeros(1, queries, heads, size, dtype=query.dtype)
    for h in range(heads):
        g = h // (heads // key.shape[1])
        for q in range(queries):
            seen = [k for k in range(key.shape[2]) if allowed[q, k]]
            scores = torch.stack([(query[0, h, q] * key[0, g, k]).sum() / size**0.5 for k in seen])
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out[0, q, h] = (torch.softmax(scores, 0)[:, None] * value[0, g, seen]).sum(0)
    return out


def block_mask(causal: bool, window: int | None = None) -> Tensor:
    segment = [s for s, n in enumerate(LENS) for _ in range(n)]
    mask = torch.zeros(15, 15, dtype=torch.bool)
    for q in range(15):
        for k in range(15):
            same, past = segment[q] == segment[k], k <= q or not causal
            mask[q, k] = same and past and (window is None or abs(q - k) < window)
    return mask


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_packed_segments_equal_an_explicit_softmax_over_a_block_mask(causal, window, softcap):
    query, key, value = qkv()
    module = nn.Module()
    module.is_causal = causal
    out, _ = attention(module, query, key, value, cu_seq_lens_q=CU, sliding_window=window, softcap=softcap)
    expected = reference(query, key, value, block_mask(causal, window), softcap)
    # the soft cap is applied to scores in float32
    torch.testing.assert_close(out, expected, atol=1e-12 if softcap is None else 1e-6, rtol=0)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), [query, key, value])
    theirs = torch.autograd.grad((expected * weight).sum(), [query, key, value])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11 if softcap is None else 1e-6, rtol=0)


def test_is_causal_given_by_the_caller_wins_over_the_module():
    query, key, value = qkv()
    module = nn.Module()
    module.is_causal = True
    out, _ = attention(module, query, key, value, cu_seq_lens_q=CU, is_causal=False)
    torch.testing.assert_close(out, reference(query, key, value, block_mask(False)), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "neither"),
        ({"cu_seq_lens_q": CU, "shared_prompts": Segments((15,), (NO_PREFIX,))}, "both"),
        ({"cu_seq_lens_q": CU, "attention_mask": torch.ones(1, 15)}, "mask of shape"),
        ({"cu_seq_lens_q": CU, "dropout": 0.1}, "dropout is 0.1"),
        ({"cu_seq_lens_q": CU, "s_aux": torch.ones(4)}, "attention sinks"),
        ({"cu_seq_lens_q": CU, "position_bias": torch.ones(4)}, "position bias"),
        ({"cu_seq_lens_q": CU[:-1]}, "segments end at 12"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(arguments, words):
    with pytest.raises(ModelError, match=words):
        attention(nn.Module(), *qkv(), **arguments)


def test_packed_queries_with_a_longer_cache_are_refused():
    query, key, value = qkv()
    with pytest.raises(ModelError, match="without a KV cache"):
        attention(nn.Module(), query[:, :, :3], key, value, cu_seq_lens_q=torch.tensor([0, 3]))


def test_a_mask_for_the_mask_function_is_refused():
    assert no_mask(batch_size=1) is None
    with pytest.raises(ModelError, match=r"shape \(2, 5\)"):
        no_mask(attention_mask=torch.ones(2, 5))
