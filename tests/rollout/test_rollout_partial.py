"""Responses cut in pieces: the same tokens as in one go, each piece under the weights of its call."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch
from rollout_kit import PROMPTS, make_engine, make_model, make_prompts, plain_twin, rows_of

from tutelage.errors import RolloutError
from tutelage.rollout.inprocess.partial import InProcessPartial
from tutelage.rollout.partial import Carried, PartialRollout, Sample
from tutelage.types import Rollout

NONE = make_prompts([])


def in_pieces(engine, prompts, budget) -> tuple[list[Rollout], int]:
    """All batches of done responses, and the number of calls."""
    partial: PartialRollout = InProcessPartial(engine)
    done, carried = partial.generate_partial(prompts, None, budget)
    batches, calls = [done], 1
    while len(carried):
        done, carried = partial.generate_partial(NONE, carried, budget)
        batches.append(done)
        calls += 1
    return batches, calls


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tokens_in_flight", [65536, 48])
def test_a_response_is_the_same_however_it_is_cut(kind, tokens_in_flight, byte_tokenizer):
    prompts = make_prompts(PROMPTS, n=3, step=5)
    free = make_engine(make_model(kind), byte_tokenizer, eos_ids=()).generate(prompts)
    eos = tuple(set(range(0, 256, 9)) - {row[0] for row in free.sequences.response_rows()})
    engine = make_engine(make_model(kind), byte_tokenizer, eos_ids=eos, tokens_in_flight=tokens_in_flight)
    whole = engine.generate(prompts)
    batches, calls = in_pieces(engine, prompts, 7)
    assert calls > 4
    assert sorted(row for batch in batches for row in rows_of(batch)) == sorted(rows_of(whole))
    by_key = {(i, s): k for k, (i, s, _) in enumerate(rows_of(whole))}
    for batch in batches:
        for b, (prompt_id, sample, _) in enumerate(rows_of(batch)):
            k = by_key[prompt_id, sample]
            torch.testing.assert_close(batch.rollout_logp.rows()[b], whole.rollout_logp.rows()[k], atol=1e-5, rtol=0)
            assert batch.finished[b] == whole.finished[k]
            assert batch.texts[b] == whole.texts[k]
            assert batch.truths[b] == whole.truths[k]


def test_rows_that_end_at_their_first_token_leave_the_others_unchanged(byte_tokenizer):
    """Reference: the same draws without any EOS, cut where the first EOS stands."""
    prompts = make_prompts(PROMPTS, n=4)
    free = make_engine(make_model("llama"), byte_tokenizer, eos_ids=()).generate(prompts)
    eos = tuple({row[0] for row in free.sequences.response_rows()[:6]})
    done, _ = InProcessPartial(make_engine(make_model("llama"), byte_tokenizer, eos_ids=eos)).generate_partial(prompts)
    for long, short in zip(free.sequences.response_rows(), done.sequences.response_rows(), strict=True):
        ends = [t for t, token in enumerate(long) if token in eos]
        assert short == (long[: ends[0] + 1] if ends else long)


def test_without_a_budget_it_is_generate(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer)
    engine.publish(3)
    prompts = make_prompts(PROMPTS, n=2)
    whole = engine.generate(prompts)
    done, carried = InProcessPartial(engine).generate_partial(prompts)
    assert len(carried) == 0
    assert rows_of(done) == rows_of(whole)
    assert done.group.tolist() == whole.group.tolist()
    assert done.weights_version.tolist() == [3] * 8
    assert done.messages == whole.messages
    assert torch.equal(done.sequences.prompt_lens, whole.sequences.prompt_lens)


def test_the_budget_and_should_stop_end_a_call(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer, eos_ids=())
    partial = InProcessPartial(engine)
    done, carried = partial.generate_partial(make_prompts(PROMPTS), None, 9)  # 4 rows: 12 tokens in 3 steps
    assert (len(done), len(carried), carried.tokens) == (0, 4, 12)
    asked = iter([False, False, True])
    done, carried = partial.generate_partial(make_prompts(PROMPTS), None, None, lambda: next(asked))
    assert carried.tokens == 8
    done, carried = partial.generate_partial(make_prompts(PROMPTS), None, None, lambda: True)
    assert (len(done), carried.tokens) == (0, 0)
    assert [s.prompt_id for s in carried.samples] == list(make_prompts(PROMPTS).ids)


@pytest.mark.parametrize("oldest", [0, 1])
def test_where_room_is_short_the_oldest_goes_on_first_however_long_it_is(oldest, byte_tokenizer):
    model, prompts = make_model("llama"), make_prompts([[97, 98], list(range(97, 117))])
    free = make_engine(model, byte_tokenizer, eos_ids=(), max_new_tokens=6)
    _, begun = InProcessPartial(free).generate_partial(prompts, None, 2)
    assert [len(sample.response) for sample in begun.samples] == [1, 1]
    carried = Carried((begun.samples[oldest], begun.samples[1 - oldest]))
    # one row at a time
    tight = make_engine(model, byte_tokenizer, eos_ids=(), max_new_tokens=6, tokens_in_flight=36)
    _, rest = InProcessPartial(tight).generate_partial(NONE, carried, 1)
    assert [len(sample.response) for sample in rest.samples] == [2, 1]
    assert [sample.prompt_id for sample in rest.samples] == [sample.prompt_id for sample in carried.samples]


def test_a_stop_string_may_span_a_cut(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer, eos_ids=(), max_new_tokens=30)
    prompts = make_prompts(PROMPTS)
    spelled = [
        (p, t, byte_tokenizer.decode(row[t : t + 2], clean_up_tokenization_spaces=False))
        for p, row in enumerate(engine.generate(prompts).sequences.response_rows())
        for t in range(1, 29)
    ]
    p, t, text = next(found for found in spelled if found[2].isascii() and len(found[2]) == 2)
    stopped = make_engine(make_model("llama"), byte_tokenizer, eos_ids=(), max_new_tokens=30, stop=(text,))
    want = stopped.generate(prompts.select([p]))
    batches, calls = in_pieces(stopped, prompts.select([p]), t + 1)
    assert calls == 2
    assert rows_of(batches[-1]) == rows_of(want)
    assert batches[-1].sequences.response_lens.tolist() == [t + 2]
    assert batches[-1].finished.tolist() == [True]


def test_pieces_under_new_weights_keep_their_logprobs_and_versions(byte_tokenizer):
    """Reference: plain transformers with each version's weights, on the tokens that version sampled."""
    old, new = make_model("llama", seed=0), make_model("llama", seed=1)
    model = make_model("llama", seed=0)
    engine = make_engine(model, byte_tokenizer, eos_ids=(), temperature=0.7)
    engine.publish(4)
    partial = InProcessPartial(engine)
    _, carried = partial.generate_partial(make_prompts(PROMPTS), None, 4 * 5)
    model.load_state_dict(new.state_dict())
    engine.publish(6)
    done, rest = partial.generate_partial(make_prompts([[8, 8]], step=1), pickle.loads(pickle.dumps(carried)))
    assert len(rest) == 0
    assert done.weights_version.tolist() == [4, 4, 4, 4, 6]
    for b in range(4):
        tokens, start = done.sequences.tokens.rows()[b], int(done.sequences.prompt_lens[b])
        for twin, part in ((plain_twin(old), slice(0, 5)), (plain_twin(new), slice(5, None))):
            with torch.no_grad():
                full = torch.log_softmax(twin(tokens[None]).logits[0].double() / 0.7, -1)
            want = full[start - 1 : -1].gather(1, tokens[start:, None]).squeeze(1)
            torch.testing.assert_close(done.rollout_logp.rows()[b][part].double(), want[part], atol=1e-5, rtol=0)


def test_segments_count_the_versions():
    sample = Sample("p", 0, 0, "rollout", 0, (1,))
    assert sample.version == -1
    sample = sample.extended([5, 6], [-1.0, -2.0], 3, False).extended([7], [-3.0], 3, False)
    sample = sample.extended([8], [-4.0], 5, True).extended([], [], 6, True)
    assert sample.versions == ((3, 3), (5, 1))
    assert sample.response == (5, 6, 7, 8)
    assert sample.version == 3
    assert Carried((sample,)).oldest == 3
    assert Carried((sample,)).tokens == 4


def test_carried_samples_go_through_json(byte_tokenizer):
    engine = make_engine(make_model("llama"), byte_tokenizer, eos_ids=())
    _, carried = InProcessPartial(engine).generate_partial(make_prompts(PROMPTS, n=2), None, 20)
    again = Carried.from_state(json.loads(json.dumps(carried.state())))
    assert again == carried
    assert hash(again.samples[0].response) == hash(carried.samples[0].response)


def test_where_a_response_is_continued_its_stream_is_another_one():
    sample = Sample("p", 0, 0, "rollout", 0, (1,))
    seeds = {sample.extended([1] * n, [0.0] * n, 0, False).position_key(7) for n in range(5)}
    assert len(seeds) == 5
    assert sample.position_key(7) == sample.key(7)


def test_greedy_prompts_and_an_empty_budget_are_refused(byte_tokenizer):
    partial = InProcessPartial(make_engine(make_model("llama"), byte_tokenizer))
    with pytest.raises(RolloutError, match="greedy"):
        partial.generate_partial(make_prompts(PROMPTS, greedy=True))
    with pytest.raises(RolloutError, match="budget_tokens is 0"):
        partial.generate_partial(make_prompts(PROMPTS), None, 0)
    with pytest.raises(RolloutError, match="'p' is empty"):
        partial.generate_partial(replace(make_prompts([[]]), ids=("p",)))
