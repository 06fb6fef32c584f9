"""The in-process engine against plain transformers, and against itself in other batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from rollout_kit import PROMPTS, make_engine, make_model, make_prompts, plain_twin, rows_of

from tutelage.errors import RolloutError
from tutelage.math.keyed import keyed_uniform, sample_key
from tutelage.protocols import RolloutEngine
from tutelage.rollout.sampling import SamplingParams

KINDS = ["llama", "gpt2"]


def test_it_is_a_rollout_engine(byte_tokenizer):
    engine: RolloutEngine = make_engine(make_model("llama"), byte_tokenizer)
    engine.publish(4)
    rollout = engine.generate(make_prompts(PROMPTS))
    assert rollout.weights_version.tolist() == [4] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate(kind, byte_tokenizer):
    model = make_model(kind)
    rollout = make_engine(model, byte_tokenizer, max_new_tokens=20).generate(make_prompts(PROMPTS, greedy=True))
    twin = plain_twin(model)
    for prompt, response in zip(PROMPTS, rollout.sequences.response_rows(), strict=True):
        ids = torch.tensor([prompt])
        want = twin.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=257
        )
        assert response == want[0, len(prompt) :].tolist()
    assert len({tuple(r) for r in rollout.sequences.response_rows()}) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_a_full_forward_of_plain_transformers(kind, byte_tokenizer):
    model = make_model(kind)
    rollout = make_engine(model, byte_tokenizer, temperature=0.7).generate(make_prompts(PROMPTS, n=3))
    twin = plain_twin(model)
    logps = rollout.rollout_logp.rows()
    for b, (tokens, start) in enumerate(
        zip(rollout.sequences.tokens.rows(), rollout.sequences.prompt_lens.tolist(), strict=True)
    ):
        with torch.no_grad():
            logits = twin(tokens[None]).logits[0].double() / 0.7
        full = torch.log_softmax(logits, -1)[start - 1 : -1].gather(1, tokens[start:, None]).squeeze(1)
        torch.testing.assert_close(logps[b].double(), full, atol=1e-5, rtol=0)
        assert full.abs().max() > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_does_not_depend_on_its_batch_or_bound(kind, byte_tokenizer):
    model = make_model(kind)
    prompts = make_prompts(PROMPTS, n=3, step=5)
    whole = make_engine(model, byte_tokenizer).generate(prompts)
    small = make_engine(model, byte_tokenizer, tokens_in_flight=64, prefill_tokens=4).generate(prompts)
    assert rows_of(small) == rows_of(whole)
    torch.testing.assert_close(small.rollout_logp.flat, whole.rollout_logp.flat, atol=1e-5, rtol=0)

    reordered = make_engine(model, byte_tokenizer).generate(prompts.select([3, 1, 0, 2]))
    assert sorted(rows_of(reordered)) == sorted(rows_of(whole))
    logp_rows = whole.rollout_logp.rows()
    for p in range(4):
        alone = make_engine(model, byte_tokenizer).generate(replace(prompts.select([p]), n=1))
        assert rows_of(alone) == rows_of(whole)[3 * p : 3 * p + 1]
        torch.testing.assert_close(alone.rollout_logp.flat, logp_rows[3 * p], atol=1e-5, rtol=0)


def test_rows_that_end_early_leave_the_others_unchanged(byte_tokenizer):
    """Many EOS ids, so that rows end at different steps and are compacted away; without EOS nothing ends."""
    model = make_model("llama")
    prompts = make_prompts(PROMPTS, n=8)
    free = make_engine(model, byte_tokenizer, eos_ids=(), max_new_tokens=30).generate(prompts)
    eos_ids = tuple(range(0, 256, 9))
    cut = make_engine(model, byte_tokenizer, eos_ids=eos_ids, max_new_tokens=30).generate(prompts)
    assert len(set(cut.sequences.response_lens.tolist())) > 8
    for long, short, finished in zip(
        free.sequences.response_rows(), cut.sequences.response_rows(), cut.finished.tolist(), strict=True
    ):
        ends = [t for t, token in enumerate(long) if token in eos_ids]
        assert short == (long[: ends[0] + 1] if ends else long)
        assert finished == bool(ends)
    for long, short in zip(free.rollout_logp.rows(), cut.rollout_logp.rows(), strict=True):
        torch.testing.assert_close(short, long[: len(short)], atol=1e-5, rtol=0)


def test_rows_that_end_at_the_first_token_leave_the_others_unchanged(byte_tokenizer):
    """The slots of the rows that go on are moved before anything was decoded into them."""
    model = make_model("llama")
    prompts = make_prompts(PROMPTS, n=3)
    free = make_engine(model, byte_tokenizer, eos_ids=()).generate(prompts)
    first = [row[0] for row in free.sequences.response_rows()]
    ends = max(set(first), key=first.count)
    assert 0 < first.count(ends) < len(first)
    assert first.index(ends) < len(first) - 1, "a row behind the first one that ends must go on"
    stopped = make_engine(model, byte_tokenizer, eos_ids=(ends, *first[:2])).generate(prompts)
    whole = free.sequences.response_rows()
    for row, response in enumerate(stopped.sequences.response_rows()):
        cut = next((t + 1 for t, token in enumerate(whole[row]) if token in (ends, *first[:2])), len(whole[row]))
        assert response == whole[row][:cut]


def test_randomness_is_keyed_by_seed_step_prompt_sample_and_purpose(byte_tokenizer):
    model = make_model("llama")
    base = make_prompts([PROMPTS[0]])

    def sample(prompts, **kwargs):
        return make_engine(model, byte_tokenizer, **kwargs).generate(prompts).sequences.response_rows()[0]

    first = sample(base)
    assert sample(base) == first
    others = [
        sample(base, seed=4),
        sample(replace(base, step=1)),
        sample(replace(base, ids=("other",))),
        sample(replace(base, purpose="evaluation")),
        make_engine(model, byte_tokenizer).generate(replace(base, n=2)).sequences.response_rows()[1],
    ]
    assert all(other != first for other in others)
    requested = make_engine(model, byte_tokenizer, seed=99)
    params = SamplingParams(temperature=0.7, max_new_tokens=12, seed=3)
    assert requested.complete(base, params).sequences.response_rows()[0] == first


def test_token_t_inverts_the_softmax_at_draw_t_of_the_key(byte_tokenizer):
    """A slow reference: one sample at a time, a full forward of plain transformers per token, a loop over the sum."""
    model = make_model("llama")
    rollout = make_engine(model, byte_tokenizer).generate(make_prompts(PROMPTS[:2], n=2, step=6))
    twin = plain_twin(model)
    for b, (prompt_id, sample, response) in enumerate(rows_of(rollout)):
        key_B = torch.tensor([sample_key(3, 6, prompt_id, sample, "rollout")])
        tokens = list(PROMPTS[b // 2])
        for t in range(len(response)):
            with torch.no_grad():
                probs = torch.softmax(twin(torch.tensor([tokens])).logits[0, -1].double() / 0.7, -1).tolist()
            u = keyed_uniform(key_B, t).item()
            tokens.append(next(token for token, below in enumerate(accumulate(probs)) if u < below))
        assert tokens[len(PROMPTS[b // 2]) :] == response


def test_samples_of_a_prompt_follow_the_models_distribution(byte_tokenizer):
    """2,000 first tokens against the exact softmax of plain transformers (chi-square over the likely tokens)."""
    from scipy import stats

    model = make_model("llama")
    rollout = make_engine(model, byte_tokenizer, max_new_tokens=1).generate(make_prompts([PROMPTS[2]], n=2000))
    with torch.no_grad():
        probs = torch.softmax(plain_twin(model)(torch.tensor([PROMPTS[2]])).logits[0, -1].double() / 0.7, -1)
    first = torch.tensor(rollout.sequences.response_rows()).squeeze(1)
    seen = torch.bincount(first, minlength=len(probs)).double()
    common = probs > 10 / 2000
    seen_bins = [*seen[common].tolist(), seen[~common].sum().item()]
    want_bins = [*(probs[common] * 2000).tolist(), (probs[~common].sum() * 2000).item()]
    assert len(seen_bins) > 5
    assert stats.chisquare(seen_bins, want_bins).pvalue > 1e-3


def test_fields_of_the_rollout(byte_tokenizer):
    prompts = make_prompts(PROMPTS[:2], n=2)
    rollout = make_engine(make_model("llama"), byte_tokenizer).generate(prompts)
    assert rollout.group.tolist() == [0, 0, 1, 1]
    assert rollout.samples.tolist() == [0, 1, 0, 1]
    assert rollout.truths == (0, 0, 1, 1)
    assert rollout.messages == (*[prompts.messages[0]] * 2, *[prompts.messages[1]] * 2)
    assert rollout.sequences.prompt_rows() == [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    assert rollout.sequences.trained.flat.all()
    assert rollout.rollout_logp.lens.tolist() == rollout.sequences.response_lens.tolist()
    assert rollout.rollout_logp.flat.dtype == torch.float32


def test_a_prompt_that_does_not_fit_the_context_is_named(byte_tokenizer):
    engine = make_engine(make_model("gpt2"), byte_tokenizer, max_new_tokens=60)
    with pytest.raises(RolloutError, match=r"'p1-1-1-1-1' has 5 tokens and may get 60 more: 65, .* context is 64"):
        engine.generate(make_prompts([[1] * 5]))
    assert engine.generate(make_prompts([[1] * 4])).sequences.prompt_lens.tolist() == [4]


def test_a_row_over_the_token_budget_is_named(byte_tokenizer):
    engine = make_engine(make_model("gpt2"), byte_tokenizer, max_new_tokens=20, tokens_in_flight=24)
    with pytest.raises(RolloutError, match=r"25, rollout.tokens_in_flight is 24"):
        engine.generate(make_prompts([[1] * 5]))


def test_an_empty_prompt_is_named(byte_tokenizer):
    with pytest.raises(RolloutError, match="'p' is empty"):
        make_engine(make_model("gpt2"), byte_tokenizer).generate(make_prompts([[]]))


def test_truncated_sampling_is_refused_in_training_and_allowed_in_evaluation(byte_tokenizer):
    model = make_model("gpt2")
    with pytest.raises(RolloutError, match="top_k=3"):
        make_engine(model, byte_tokenizer, top_k=3)
    engine = make_engine(model, byte_tokenizer)
    params = SamplingParams(top_k=1, temperature=0.7, max_new_tokens=12)
    with pytest.raises(RolloutError, match="top_k=1"):
        engine.complete(make_prompts(PROMPTS), params)
    answers = engine.complete(make_prompts(PROMPTS, purpose="evaluation"), params)
    greedy = engine.generate(make_prompts(PROMPTS, greedy=True))
    assert rows_of(answers) == rows_of(greedy)
    assert answers.rollout_logp.flat.abs().max() < 1e-6


def test_an_evaluation_engine_may_truncate_by_default(byte_tokenizer):
    engine = make_engine(make_model("gpt2"), byte_tokenizer, top_k=3, purpose="evaluation")
    assert len(engine.generate(make_prompts(PROMPTS, purpose="evaluation"))) == 4
    assert len(engine.generate(make_prompts(PROMPTS, purpose="evaluation", greedy=True))) == 4
    with pytest.raises(RolloutError, match="top_k=3"):
        engine.generate(make_prompts(PROMPTS))


def test_complete_takes_bare_token_rows(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer)
    answers = engine.complete(PROMPTS[:2], SamplingParams(n=2, max_new_tokens=5, top_p=0.9, temperature=0.7))
    assert answers.prompt_ids == ("0", "0", "1", "1")
    assert len(answers.texts) == 4
    alone = engine.complete(PROMPTS[:1], SamplingParams(n=1, max_new_tokens=5, top_p=0.9, temperature=0.7))
    assert alone.texts[0] == answers.texts[0]


def test_modes_and_gradients_are_as_they_were(byte_tokenizer):
    model = make_model("gpt2").train()
    model.transformer.h[0].eval()
    before = [m.training for m in model.modules()]
    first = make_engine(model, byte_tokenizer).generate(make_prompts(PROMPTS))
    assert [m.training for m in model.modules()] == before
    quiet = make_engine(model.eval(), byte_tokenizer).generate(make_prompts(PROMPTS))
    assert rows_of(first) == rows_of(quiet)  # GPT-2's dropout of 0.1 was off
    loss = model(torch.tensor([[1, 2, 3]]), cu_seq_lens_q=torch.tensor([0, 3]), use_cache=False).logits.sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_modes_come_back_after_an_error(byte_tokenizer):
    model = make_model("gpt2").train()
    model.lm_head.weight.data[:, 0] = float("nan")
    with pytest.raises(RolloutError, match=r"logits for prompt 'p\S+' are not finite at response token 0"):
        make_engine(model, byte_tokenizer).generate(make_prompts(PROMPTS))
    assert all(m.training for m in model.modules())


def test_activation_checkpointing_does_not_lose_the_cache(byte_tokenizer):
    model = make_model("llama")
    plain = make_engine(model, byte_tokenizer).generate(make_prompts(PROMPTS))
    model.train()
    model.gradient_checkpointing_enable()
    assert rows_of(make_engine(model, byte_tokenizer).generate(make_prompts(PROMPTS))) == rows_of(plain)


def test_changed_weights_are_sampled_at_once(byte_tokenizer):
    model = make_model("llama")
    engine = make_engine(model, byte_tokenizer)
    engine.generate(make_prompts(PROMPTS))
    model.load_state_dict(make_model("llama", seed=1).state_dict())
    fresh = make_engine(make_model("llama", seed=1), byte_tokenizer).generate(make_prompts(PROMPTS))
    assert rows_of(engine.generate(make_prompts(PROMPTS))) == rows_of(fresh)


def test_an_adapter_is_on(byte_tokenizer):
    from peft import LoraConfig, get_peft_model

    model = make_model("llama")
    before = make_engine(model, byte_tokenizer).generate(make_prompts(PROMPTS))
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    engine = make_engine(peft_model, byte_tokenizer)
    assert rows_of(engine.generate(make_prompts(PROMPTS))) == rows_of(before)
    torch.manual_seed(0)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted = engine.generate(make_prompts(PROMPTS))
    merged = plain_twin_of_merged(peft_model)
    tokens, start = adapted.sequences.tokens.rows()[0], len(PROMPTS[0])
    with torch.no_grad():
        full = torch.log_softmax(merged(tokens[None]).logits[0] / 0.7, -1)[start - 1 : -1]
    want = full.gather(1, tokens[start:, None]).squeeze(1)
    torch.testing.assert_close(adapted.rollout_logp.rows()[0], want, atol=1e-4, rtol=0)
    assert rows_of(adapted) != rows_of(before)


def plain_twin_of_merged(peft_model):
    import copy

    merged = copy.deepcopy(peft_model).merge_and_unload()
    return plain_twin(merged)


def test_bfloat16_logits_are_sampled_in_float32(byte_tokenizer):
    model = make_model("llama").to(torch.bfloat16)
    rollout = make_engine(model, byte_tokenizer).generate(make_prompts(PROMPTS, n=4))
    assert rollout.rollout_logp.flat.dtype == torch.float32
    on_the_bfloat16_grid = rollout.rollout_logp.flat.to(torch.bfloat16).float() == rollout.rollout_logp.flat
    assert on_the_bfloat16_grid.float().mean() < 0.5


def test_the_forward_context_wraps_every_forward(byte_tokenizer):
    model = make_model("llama")
    engine = make_engine(
        model, byte_tokenizer, forward_context=lambda: torch.autocast("cpu", dtype=torch.bfloat16), temperature=1.0
    )
    rollout = engine.generate(make_prompts(PROMPTS))
    full = make_engine(model, byte_tokenizer, temperature=1.0).generate(make_prompts(PROMPTS))
    gap = abs(rollout.rollout_logp.flat[0].item() - full.rollout_logp.flat[0].item())
    assert 1e-6 < gap < 0.5


def test_progress_counts_every_response_once(byte_tokenizer):
    calls = []
    engine = make_engine(
        make_model("llama"),
        byte_tokenizer,
        eos_ids=tuple(range(0, 256, 9)),
        tokens_in_flight=64,
        progress=lambda done, total: calls.append((done, total)),
    )
    engine.generate(make_prompts(PROMPTS, n=3))
    assert calls[-1] == (12, 12)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_another_attention_is_refused(byte_tokenizer):
    with pytest.raises(RolloutError, match="'sdpa'"):
        make_engine(make_model("llama", implementation="sdpa"), byte_tokenizer)


def test_no_prompts_give_an_empty_rollout(byte_tokenizer):
    assert len(make_engine(make_model("llama"), byte_tokenizer).generate(make_prompts([]))) == 0
