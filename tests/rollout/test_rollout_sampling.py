"""The sampler against exact distributions, hand-made truncations and wrong parameters."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from tutelage.errors import RolloutError
from tutelage.math.keyed import keyed_uniform, sample_key
from tutelage.rollout import sampling
from tutelage.rollout.sampling import SamplingParams, require_trainable, sample_tokens, sampled_logprobs

LOGITS = [2.0, -1.0, 0.5, 0.0, -3.0, 1.0]


def keys(count: int) -> torch.Tensor:
    return torch.tensor([sample_key(0, 0, "p", i, "rollout") for i in range(count)])


def softmax(logits, temperature=1.0):
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def draw(logits, count, **kwargs):
    logits_BV = torch.tensor([logits]).expand(count, -1)
    return sample_tokens(logits_BV, keys(count), torch.zeros(count, dtype=torch.int64), SamplingParams(**kwargs))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_frequencies_follow_the_exact_softmax(temperature):
    count = 20000
    token_B, _ = draw(LOGITS, count, temperature=temperature)
    seen = torch.bincount(token_B, minlength=6).tolist()
    expected = [p * count for p in softmax(LOGITS, temperature)]
    assert stats.chisquare(seen, expected).pvalue > 1e-3


def test_frequencies_over_counters_of_one_key_follow_the_softmax():
    count = 20000
    key_B = keys(1).expand(count).contiguous()
    logits_BV = torch.tensor([LOGITS]).expand(count, -1)
    token_B, _ = sample_tokens(logits_BV, key_B, torch.arange(count), SamplingParams())
    expected = [p * count for p in softmax(LOGITS)]
    assert stats.chisquare(torch.bincount(token_B, minlength=6).tolist(), expected).pvalue > 1e-3


def test_each_draw_inverts_the_cumulative_distribution():
    token_B, _ = draw(LOGITS, 500, temperature=0.7)
    probs = softmax(LOGITS, 0.7)
    for token, u in zip(token_B.tolist(), keyed_uniform(keys(500), 0).tolist(), strict=True):
        total, want = 0.0, None
        for v, p in enumerate(probs):
            total += p
            if u < total:
                want = v
                break
        assert token == want


def test_logprob_is_of_the_distribution_after_temperature():
    token_B, logp_B = draw(LOGITS, 50, temperature=0.7)
    probs = softmax(LOGITS, 0.7)
    torch.testing.assert_close(logp_B, torch.tensor([math.log(probs[t]) for t in token_B.tolist()]))


def support(probs, **kwargs):
    logp_BV = sampled_logprobs(torch.tensor([[math.log(p) for p in probs]]), SamplingParams(**kwargs))
    return {v: round(math.exp(x), 6) for v, x in enumerate(logp_BV[0].tolist()) if x > -math.inf}


def test_top_k_keeps_exactly_k_and_renormalises():
    assert support([0.1, 0.4, 0.2, 0.3], top_k=2) == {1: round(4 / 7, 6), 3: round(3 / 7, 6)}
    assert support([0.25, 0.25, 0.25, 0.25], top_k=2) == {0: 0.5, 1: 0.5}


def test_top_p_keeps_the_token_that_crosses():
    assert support([0.1, 0.4, 0.2, 0.3], top_p=0.65) == {1: round(4 / 7, 6), 3: round(3 / 7, 6)}
    assert set(support([0.1, 0.4, 0.2, 0.3], top_p=0.75)) == {1, 2, 3}
    assert set(support([0.1, 0.4, 0.2, 0.3], top_p=0.01)) == {1}


def test_min_p_is_relative_to_the_most_likely_token():
    # 0.4 * 0.6 = 0.24: 0.2 falls, 0.3 stays.
    assert set(support([0.1, 0.4, 0.2, 0.3], min_p=0.6)) == {1, 3}
    assert set(support([0.1, 0.4, 0.2, 0.3], min_p=0.4)) == {1, 2, 3}


def test_truncations_combine_on_the_renormalised_rest():
    # top_k=3 leaves 4/9, 3/9, 2/9; before the third stand 7/9 = 0.777 >= 0.75, so top_p=0.75 drops it. On the whole
    # distribution only 0.7 would stand before it, and it would stay.
    assert set(support([0.1, 0.4, 0.2, 0.3], top_k=3, top_p=0.75)) == {1, 3}
    assert set(support([0.1, 0.4, 0.2, 0.3], top_k=3, min_p=0.8)) == {1}


def test_truncated_draws_stay_in_the_support_and_report_its_logprob():
    probs = [0.1, 0.4, 0.2, 0.3]
    token_B, logp_B = draw([math.log(p) for p in probs], 5000, top_k=2)
    assert set(token_B.tolist()) == {1, 3}
    assert (
        stats.chisquare([int((token_B == 1).sum()), int((token_B == 3).sum())], [5000 * 4 / 7, 5000 * 3 / 7]).pvalue
        > 1e-3
    )
    want = {1: math.log(4 / 7), 3: math.log(3 / 7)}
    torch.testing.assert_close(logp_B, torch.tensor([want[t] for t in token_B.tolist()]))


def test_temperature_comes_before_truncation():
    # At temperature 0.5 the probabilities 0.1 .4 .2 .3 become .01 .16 .04 .09 over .3; the first two have .833.
    assert set(support([0.1, 0.4, 0.2, 0.3], temperature=0.5, top_p=0.8)) == {1, 3}
    assert set(support([0.1, 0.4, 0.2, 0.3], temperature=1.0, top_p=0.8)) == {1, 2, 3}


def test_a_token_of_probability_zero_is_never_drawn():
    ninf = -math.inf
    token_B, _ = draw([ninf, 0.0, ninf, 0.0, ninf], 5000)
    assert set(token_B.tolist()) == {1, 3}


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (1.0 - 2.0**-53, 3)])
def test_the_ends_of_the_uniform_stay_inside_the_support(monkeypatch, u, token):
    monkeypatch.setattr(sampling, "keyed_uniform", lambda k, c: torch.full(k.shape, u, dtype=torch.float64))
    token_B, _ = draw([-math.inf, 0.3, 0.1, 0.2, -math.inf], 1)
    assert token_B.item() == token


def test_greedy_takes_the_argmax_and_reports_the_softmax_logprob():
    token_B, logp_B = draw(LOGITS, 3, greedy=True, temperature=0.7)
    assert token_B.tolist() == [0, 0, 0]
    assert logp_B[0].item() == pytest.approx(math.log(softmax(LOGITS, 0.7)[0]), abs=1e-6)


def test_chunks_of_rows_change_nothing(monkeypatch):
    whole = draw(LOGITS, 37, temperature=0.7)
    monkeypatch.setattr(sampling, "_CHUNK_ELEMENTS", {"cpu": 20})
    parts = draw(LOGITS, 37, temperature=0.7)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_bfloat16_logits_are_sampled_in_float32():
    logits_BV = torch.tensor([LOGITS], dtype=torch.bfloat16)
    logp_BV = sampled_logprobs(logits_BV, SamplingParams(temperature=0.7))
    assert logp_BV.dtype == torch.float32
    torch.testing.assert_close(logp_BV[0].exp(), torch.tensor(softmax(LOGITS, 0.7)), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("max_new_tokens", 0),
        ("n", 0),
        ("stop", ("",)),
        ("stop", "text"),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(RolloutError, match=f"{name} is"):
        SamplingParams(**{name: value})


def test_greedy_with_a_truncation_is_refused():
    with pytest.raises(RolloutError, match="top_k=5"):
        SamplingParams(greedy=True, top_k=5)
    assert SamplingParams(top_k=5).with_greedy() == SamplingParams(greedy=True)


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_truncation_is_for_other_purposes_than_training(cut):
    with pytest.raises(RolloutError, match=next(iter(cut))):
        require_trainable(SamplingParams(**cut), "rollout")
    require_trainable(SamplingParams(**cut), "evaluation")


def test_a_truncation_that_cuts_nothing_is_none():
    require_trainable(SamplingParams(top_p=1.0, min_p=0.0), "rollout")


def by_the_whole_cumulative_sum(logits_BV, key_B, counter_B, params):
    """The same rule in one level: a float64 cumulative sum over the vocabulary."""
    cdf_BV = sampled_logprobs(logits_BV, params).exp().double().cumsum(-1)
    target_B1 = keyed_uniform(key_B, counter_B)[:, None] * cdf_BV[:, -1:]
    return torch.searchsorted(cdf_BV, target_B1, right=True).squeeze(1)


@pytest.mark.parametrize("size", [6, 255, 256, 257, 5000])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.3}, {"top_k": 7}, {"top_p": 0.6, "min_p": 0.01}])
def test_blocks_change_no_draw(size, asked):
    """2,400 draws for each size; the two sums differ by about 1e-16 of the total."""
    params, generator = SamplingParams(**asked), torch.Generator().manual_seed(size)
    logits_BV = 3 * torch.randn(12, size, generator=generator)
    logits_BV[:, torch.randperm(size, generator=generator)[: size // 3]] = -math.inf
    source_B = torch.arange(12).repeat_interleave(200)
    key_B, counter_B = keys(2400), torch.arange(2400) % 7
    token_B, logp_B = sample_tokens(logits_BV, key_B, counter_B, params, source_B)
    assert torch.equal(token_B, by_the_whole_cumulative_sum(logits_BV[source_B], key_B, counter_B, params))
    assert logp_B.isfinite().all()
    assert len(token_B.unique()) > min(size // 3, 5)
    again = sample_tokens(logits_BV[source_B], key_B, counter_B, params)
    assert torch.equal(again[0], token_B)
    assert torch.equal(again[1], logp_B)


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7}, {"greedy": True}])
def test_the_logprob_of_a_wide_vocabulary_is_that_of_float64(asked):
    """49,153 tokens are 192 blocks and one token more; a sum in float32 alone is off by up to 1e-5 here."""
    logits_BV = 3 * torch.randn(12, 49153, generator=torch.Generator().manual_seed(1))
    token_B, logp_B = sample_tokens(logits_BV, keys(12), torch.arange(12), SamplingParams(**asked))
    wide_BV = logits_BV.double() / asked.get("temperature", 1.0)
    want_B = wide_BV[torch.arange(12), token_B] - wide_BV.exp().sum(-1).log()
    torch.testing.assert_close(logp_B.double(), want_B, atol=1.5e-6, rtol=0)


def test_draws_of_one_row_fall_into_the_right_chunk(monkeypatch):
    logits_UV = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    source_B = torch.tensor([0, 0, 2, 2, 2, 3, 7, 8, 8])
    whole = sample_tokens(logits_UV, keys(9), torch.zeros(9, dtype=torch.int64), SamplingParams(), source_B)
    monkeypatch.setattr(sampling, "_CHUNK_ELEMENTS", {"cpu": 12})
    parts = sample_tokens(logits_UV, keys(9), torch.zeros(9, dtype=torch.int64), SamplingParams(), source_B)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53])
def test_the_ends_of_a_block_stay_inside_the_support(monkeypatch, u):
    """Probability at one token of each of three blocks, between blocks that have none."""
    monkeypatch.setattr(sampling, "keyed_uniform", lambda k, c: torch.full(k.shape, u, dtype=torch.float64))
    logits = torch.full((1, 7 * 256), -math.inf)
    logits[0, [256 + 9, 3 * 256 + 255, 5 * 256]] = torch.tensor([0.1, 0.3, 0.2])
    token_B, _ = sample_tokens(logits, keys(1), torch.zeros(1, dtype=torch.int64), SamplingParams())
    assert token_B.item() == {0.0: 265, 0.5: 1023}.get(u, 1280)
