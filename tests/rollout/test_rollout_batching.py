"""Continuous batching: every token against one-by-one generation by plain transformers, bounds, reuse, streams."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import pytest
import torch
from native_kit import needs_compiler, why_no_compiler
from rollout_kit import PROMPTS, make_engine, make_model, make_prompts, plain_twin, rows_of
from transformers import AutoTokenizer

from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import RolloutError
from tutelage.math.keyed import keyed_uniform, sample_key
from tutelage.models.fused import fuse
from tutelage.models.load import load_causal_lm
from tutelage.native import ops
from tutelage.rollout.inprocess.admission import Request
from tutelage.rollout.inprocess.batch import PAGE, Bounds, ContinuousBatch
from tutelage.rollout.inprocess.mixture import GeometricMixture
from tutelage.rollout.inprocess.partial import InProcessPartial
from tutelage.rollout.partial import Carried, Sample
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Rollout

ENDS = tuple(range(0, 256, 17))
"""So many EOS tokens that rows end at different steps."""


def due_tokens(twin, prompt, response, key, params):
    """For each place, the token that one row alone draws there after the tokens before it: plain transformers' own
    forward, float64 probabilities, loops for truncation and the draw."""
    with torch.no_grad():
        logits = twin(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double()
    due = []
    for t, probs in enumerate(torch.softmax(logits / params.temperature, -1).tolist()):
        if params.greedy:
            due.append(probs.index(max(probs)))
            continue
        kept = truncated(probs, params)
        u = keyed_uniform(torch.tensor([key]), t).item() * sum(kept)
        due.append(next(v for v, below in enumerate(accumulate(kept)) if u < below))
    return due


def ends_at(response, params, ends, tokenizer):
    """The number of tokens after which the response must end, by EOS or by its text; None where nothing ends it."""
    for t in range(1, len(response) + 1):
        text = tokenizer.decode(response[:t], clean_up_tokenization_spaces=False)
        if response[t - 1] in ends or any(s in text for s in params.stop):
            return t
    return None


def truncated(probs, params):
    order = sorted(range(len(probs)), key=lambda v: (-probs[v], v))[: params.top_k]
    if params.top_p is not None:
        total, sums = sum(probs[v] for v in order), [0.0]
        for v in order:
            sums.append(sums[-1] + probs[v])
        order = [v for v, before in zip(order, sums, strict=False) if before < params.top_p * total]
    return [p if v in set(order) else 0.0 for v, p in enumerate(probs)]


@lru_cache
def model_of(kind):
    model = make_model(kind)
    return model, plain_twin(model)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize(
    "asked",
    [{}, {"stop": ("e", "0 ", "Q")}, {"greedy": True}, {"top_k": 20, "top_p": 0.8}],
    ids=["eos", "stop strings", "greedy", "truncated"],
)
def test_every_token_is_that_of_one_row_alone_however_often_pages_change_hands(kind, n, asked, byte_tokenizer):
    """Two to four rows at a time have room, so that rows begin in the pages of others again and again."""
    model, twin = model_of(kind)
    params = SamplingParams(temperature=0.9, max_new_tokens=9, n=n, **asked)
    prompts = make_prompts(PROMPTS, purpose="evaluation", step=2)
    engine = make_engine(model, byte_tokenizer, eos_ids=ENDS, tokens_in_flight=40, prefill_tokens=9)
    rollout = engine.complete(prompts, params)
    cache = engine.cache
    assert cache.tokens <= 40
    taken = sum(-(-int(s) // cache.page) for s in rollout.sequences.tokens.lens)
    assert n == 1 or taken > 2 * cache.pages, "pages must be used several times"
    for b, (name, sample, response) in enumerate(rows_of(rollout)):
        key = sample_key(3, 2, name, sample, "evaluation")
        assert response == due_tokens(twin, PROMPTS[b // n], response, key, params)
        end = ends_at(response, params, ENDS, byte_tokenizer)
        assert len(response) == (9 if end is None else end)
        assert bool(rollout.finished[b]) == (end is not None)


def test_rollout_logp_equals_the_training_engines_logprobs(tiny_llama_folder):
    """Tolerance 1e-5 in float32."""
    policy = load_causal_lm(ModelConfig(path=str(tiny_llama_folder)))
    engine = ModelEngine(policy, OptimConfig())
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    sampler = make_engine(
        policy.model, tokenizer, eos_ids=(2,), temperature=1.0, tokens_in_flight=60, max_new_tokens=20
    )
    rollout = sampler.generate(make_prompts([[5, 6, 7], [8, 9], [5] * 11], n=4))
    trained = engine.logprobs(rollout.sequences, 1.0)
    torch.testing.assert_close(rollout.rollout_logp.flat, trained.flat, atol=1e-5, rtol=0)
    assert sampler.cache.tokens <= 60


# ---- memory ----


def test_the_cache_is_allocated_once_within_its_bound(byte_tokenizer):
    model = make_model("llama")
    engine = make_engine(model, byte_tokenizer, tokens_in_flight=200, max_new_tokens=40, eos_ids=ENDS)
    engine.generate(make_prompts(PROMPTS, n=8))
    use = engine.cache
    # Keys and values of 2 layers with 2 heads of 32 numbers, 4 bytes each.
    assert use.bytes == use.tokens * 2 * 2 * 2 * 32 * 4
    assert use.tokens <= 200
    assert use.page == PAGE
    assert use.peak <= use.pages


def test_a_call_that_needs_less_than_the_bound_allocates_less(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer, max_new_tokens=PAGE + 2)
    engine.generate(make_prompts([PROMPTS[0], PROMPTS[2]], n=3))
    # One page for each of two prompts; each of six rows writes PAGE + 1 positions at most: two pages.
    assert engine.cache.pages == 2 + 6 * 2
    assert engine.cache.peak == 14


def test_short_responses_take_no_pages_of_long_ones(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer, max_new_tokens=50, eos_ids=range(259))
    engine.generate(make_prompts(PROMPTS[:1], n=3))
    assert engine.cache.pages == 1 + 3 * 2
    assert engine.cache.peak == 1, "every response ends with its first token"


@pytest.mark.parametrize("mixed", [False, True])
def test_nothing_of_one_row_is_seen_by_another(mixed, byte_tokenizer):
    """Every page that is free is filled with NaN after every step, and every page before the first."""
    model = make_model("llama")
    if mixed:
        model = GeometricMixture(model, make_model("llama", seed=1), 0.3)
    engine = make_engine(model, byte_tokenizer, eos_ids=ENDS, tokens_in_flight=64, max_new_tokens=12)
    params = replace(engine.params, n=3)
    prompts = make_prompts(PROMPTS, n=3)
    want = engine.generate(prompts)
    batch = engine._batch(prompts, params)
    empty = batch.cache._empty
    batch.cache._empty = lambda states: empty(states).fill_(torch.nan)
    poisoned = 0
    with torch.no_grad():
        model.eval()
        while batch.busy:
            batch.step()
            for store in batch.cache.stores():
                store[list(batch.table.free)] = torch.nan
                poisoned += len(batch.table.free)
    assert poisoned > 100
    for row, response in enumerate(want.sequences.response_rows()):
        assert batch.tokens[row, : batch.lens[row]].tolist() == response
    flat = torch.cat([batch.logp[row, : batch.lens[row]] for row in range(12)])
    torch.testing.assert_close(flat, want.rollout_logp.flat, atol=1e-6, rtol=0)
    assert len(batch.table.free) == batch.table.pages


@pytest.mark.parametrize("compiled", [True, False])
def test_pages_of_a_bfloat16_model_are_of_the_dtype_that_is_read(byte_tokenizer, monkeypatch, compiled):
    """That of the model where the kernels widen it on the way, else the one that multiplies."""
    if not compiled:
        monkeypatch.setattr(ops, "takes", lambda *tensors: False)
    elif why_no_compiler():
        pytest.skip(why_no_compiler())
    engine = make_engine(make_model("llama").bfloat16(), byte_tokenizer)
    batch = engine._batch(make_prompts(PROMPTS, n=2), replace(engine.params, n=2))
    with torch.no_grad():
        batch.step()
        batch.step()
    stores = batch.cache.stores()
    assert {store.dtype for store in stores} == {torch.bfloat16 if compiled else torch.float32}
    assert batch.use.bytes == (2 if compiled else 4) * sum(store.numel() for store in stores)


@needs_compiler
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_kernels_answer_as_torch_does(byte_tokenizer, monkeypatch, architecture):
    """Long enough for several pages of a row, with rows that begin and end on the way; and the kernels were asked."""
    model = make_model(architecture)
    fuse(model)
    engine = make_engine(model, byte_tokenizer, tokens_in_flight=160, max_new_tokens=40)
    prompts, calls, call = make_prompts(PROMPTS, n=3), set(), ops._call
    monkeypatch.setattr(ops, "_call", lambda name, *rest: calls.add(name) or call(name, *rest))
    found = engine.generate(prompts)
    asked = {"paged_attention", "page_write"} | ({"rms_norm", "rotary", "swiglu"} if architecture == "llama" else set())
    assert calls == asked
    calls.clear()
    monkeypatch.setattr(ops, "takes", lambda *tensors: False)
    want = engine.generate(prompts)
    assert calls == set()
    assert torch.equal(found.sequences.tokens.flat, want.sequences.tokens.flat)
    torch.testing.assert_close(found.rollout_logp.flat, want.rollout_logp.flat, atol=1e-5, rtol=0)


def test_a_request_that_never_fits_is_refused_instead_of_waiting_for_ever(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer, tokens_in_flight=16, max_new_tokens=12)
    carried = Carried((Sample("long", 0, 0, "rollout", 0, tuple(range(1, 21))),))
    with pytest.raises(RolloutError, match="need 31 cached tokens, the bound is 16"):
        InProcessPartial(engine).generate_partial(make_prompts([]), carried)


# ---- computation ----


def watched(model):
    """Rows of each decode pass and prompt tokens of each prefill pass, as they come."""
    decoded, prefilled = [], []

    def note(module, args, kwargs):
        rows, tokens = kwargs["input_ids"].shape
        (prefilled if "cu_seq_lens_q" in kwargs else decoded).append(rows * tokens)

    model.register_forward_pre_hook(note, with_kwargs=True)
    return decoded, prefilled


def test_a_prompt_is_prefilled_once_for_all_its_samples_and_all_its_names(byte_tokenizer):
    model = make_model("llama")
    _, prefilled = watched(model)
    prompts = make_prompts([PROMPTS[0], PROMPTS[2], PROMPTS[0]], n=4)
    prompts = replace(prompts, ids=("a", "b", "c"))
    rollout = make_engine(model, byte_tokenizer, tokens_in_flight=64).generate(prompts)
    assert sum(prefilled) == len(PROMPTS[0]) + len(PROMPTS[2])
    rows = [row for _, _, row in rows_of(rollout)]
    assert rows[:4] != rows[8:], "other ids draw other samples"
    alone = make_engine(make_model("llama"), byte_tokenizer).generate(prompts.select([2]))
    assert rows_of(alone) == rows_of(rollout)[8:]


@pytest.mark.parametrize("tokens_in_flight", [65536, 100])
def test_no_row_is_computed_after_its_end(tokens_in_flight, byte_tokenizer):
    model = make_model("llama")
    decoded, _ = watched(model)
    engine = make_engine(model, byte_tokenizer, eos_ids=ENDS, tokens_in_flight=tokens_in_flight, max_new_tokens=30)
    rollout = engine.generate(make_prompts(PROMPTS, n=8))
    lens = rollout.sequences.response_lens
    assert len(set(lens.tolist())) > 5
    assert sum(decoded) == int((lens - 1).sum()), "the first token is of the prefill, the last one is never fed"


def test_ended_rows_make_room_at_once(byte_tokenizer):
    """Four slots and many short rows: the passes are as full as they can be."""
    model = make_model("llama")
    decoded, _ = watched(model)
    engine = make_engine(model, byte_tokenizer, eos_ids=ENDS, max_new_tokens=30, slots=4)
    rollout = engine.generate(make_prompts(PROMPTS[:1], n=32))
    assert max(decoded) == 4
    full = sum(rows == 4 for rows in decoded)
    assert full >= len(decoded) - int(rollout.sequences.response_lens.max())


# ---- streams ----


def test_a_stream_gives_whole_groups_as_they_end_and_all_of_them_are_generate(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer, eos_ids=ENDS, max_new_tokens=20, tokens_in_flight=100)
    engine.publish(3)
    prompts = make_prompts([*PROMPTS, [9, 9]], n=3)
    parts = list(engine.stream(prompts))
    assert [len(part) for part in parts] == [3] * 5
    order = [int(part.group[0]) for part in parts]
    assert sorted(order) == list(range(5))
    assert order != sorted(order), "groups come as they end"
    joined = Rollout.concat([parts[order.index(p)] for p in range(5)])
    want = engine.generate(prompts)
    assert rows_of(joined) == rows_of(want)
    torch.testing.assert_close(joined.rollout_logp.flat, want.rollout_logp.flat, atol=1e-6, rtol=0)
    for name in ("group", "finished", "weights_version", "samples"):
        assert torch.equal(getattr(joined, name), getattr(want, name)), name
    for name in ("truths", "messages", "texts", "prompt_ids"):
        assert getattr(joined, name) == getattr(want, name), name
    assert torch.equal(joined.sequences.prompt_lens, want.sequences.prompt_lens)


def test_a_closed_stream_computes_nothing_more(byte_tokenizer):
    model = make_model("llama")
    decoded, _ = watched(model)
    engine = make_engine(model, byte_tokenizer, eos_ids=ENDS, max_new_tokens=30)
    prompts = make_prompts(PROMPTS, n=2)
    list(engine.stream(prompts))
    whole = len(decoded)
    decoded.clear()
    stream = engine.stream(prompts)
    next(stream)
    stream.close()
    assert len(decoded) < whole
    seen = len(decoded)
    assert list(stream) == []
    assert len(decoded) == seen


def test_between_two_parts_the_model_is_as_it_was_found(byte_tokenizer):
    model = make_model("llama").train()
    engine = make_engine(model, byte_tokenizer, eos_ids=ENDS, max_new_tokens=20)
    for _ in engine.stream(make_prompts(PROMPTS, n=2)):
        assert model.training
        assert torch.is_grad_enabled()
        engine.generate(make_prompts(PROMPTS[:1], step=9))  # another call in between


def test_weights_that_are_published_while_a_stream_is_open_are_refused(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer, eos_ids=ENDS, max_new_tokens=20)
    stream = engine.stream(make_prompts(PROMPTS, n=2))
    next(stream)
    engine.publish(1)
    with pytest.raises(RolloutError, match="version 1 were published while responses of version 0"):
        next(stream)


def test_a_stream_refuses_what_it_can_before_its_first_part(byte_tokenizer):
    engine = make_engine(make_model("gpt2"), byte_tokenizer, max_new_tokens=60)
    with pytest.raises(RolloutError, match="context is 64"):
        engine.stream(make_prompts([[1] * 5]))
    assert list(engine.stream(make_prompts([]))) == []


def test_carried_samples_begin_before_new_ones(byte_tokenizer):
    """With room for one row the budget goes to the sample that was begun before, though a new prompt is longer."""
    engine = make_engine(make_model("llama"), byte_tokenizer, eos_ids=(), slots=1)
    _, carried = InProcessPartial(engine).generate_partial(make_prompts([PROMPTS[0]]), None, 4)
    _, carried = InProcessPartial(engine).generate_partial(make_prompts([PROMPTS[2]]), carried, 4)
    assert [len(sample.response) for sample in carried.samples] == [8, 0]


def test_a_batch_says_how_many_tokens_it_sampled(byte_tokenizer):
    model = make_model("llama")
    engine = make_engine(model, byte_tokenizer, eos_ids=(), max_new_tokens=5)
    batch = engine.start([Request((1, 2), 7, "p"), Request((1, 2, 3), 8, "q", done=1)], engine.params, [[], [3]])
    assert isinstance(batch, ContinuousBatch)
    with torch.no_grad():
        while batch.busy:
            batch.step()
    assert batch.sampled == 5 + 4
    assert batch.lens.tolist() == [5, 5]
    assert Bounds().tokens == 65536
