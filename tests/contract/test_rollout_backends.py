"""One contract for every rollout backend: the same model, the same prompts, the same batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tutelage.config.common import ModelConfig
from tutelage.config.vllm import VLLMConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import RolloutError, installed
from tutelage.models.load import load_causal_lm
from tutelage.protocols import RolloutEngine
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.inprocess.partial import InProcessPartial
from tutelage.rollout.partial import Carried, PartialRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Prompts

ROWS = ((5, 9, 20), (7,), (30, 31, 32, 33, 34, 35, 36, 37), (100, 5))
EOS = (2, 63, 40, 91)  # several, so that responses end at different lengths
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=16)
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)


@dataclass
class Backend:
    name: str
    engine: Any
    partial: PartialRollout
    trainer: ModelEngine


@pytest.fixture(scope="module", params=["inprocess", VLLM])
def backend(request, tiny_llama_folder, tiny_tokenizer) -> Iterator[Backend]:
    policy = load_causal_lm(ModelConfig(path=str(tiny_llama_folder)))
    trainer = ModelEngine.frozen(policy)
    if request.param == "inprocess":
        engine = InProcessRollout(policy.model, tiny_tokenizer, EOS, PARAMS, seed=3, response_prefix=" ")
        yield Backend("inprocess", engine, InProcessPartial(engine), trainer)
        return
    if not installed("vllm"):
        pytest.skip("vLLM is not installed: run `make vllm`")
    from tutelage.rollout.vllm.engine import VLLMRollout, VLLMSpec

    config = VLLMConfig(max_model_len=64, kv_cache_memory_bytes=64 << 20, max_num_seqs=32)
    spec = VLLMSpec(str(tiny_llama_folder), tiny_tokenizer, EOS, PARAMS, config, seed=3, response_prefix=" ")
    rollout = VLLMRollout(spec)
    yield Backend("vllm", rollout, rollout, trainer)
    rollout.close()


@pytest.fixture(scope="module")
def reference(tiny_llama_folder, tiny_tokenizer) -> InProcessRollout:
    """Greedy answers of the in-process engine, itself tested against plain transformers."""
    policy = load_causal_lm(ModelConfig(path=str(tiny_llama_folder)))
    return InProcessRollout(policy.model, tiny_tokenizer, EOS, PARAMS, seed=3, response_prefix=" ")


def prompts_of(rows=ROWS, **kwargs) -> Prompts:
    return Prompts(
        tokens=tuple(rows),
        ids=tuple(f"p{'-'.join(map(str, r))}" for r in rows),
        truths=tuple(range(len(rows))),
        messages=tuple(({"role": "user", "content": str(i)},) for i in range(len(rows))),
        **kwargs,
    )


def rows_of(rollout):
    return list(zip(rollout.prompt_ids, rollout.samples.tolist(), rollout.sequences.response_rows(), strict=True))


def test_fields_of_the_batch(backend):
    engine: RolloutEngine = backend.engine
    prompts = prompts_of(ROWS[:2], n=2)
    rollout = engine.generate(prompts)
    assert rollout.group.tolist() == [0, 0, 1, 1]
    assert rollout.samples.tolist() == [0, 1, 0, 1]
    assert rollout.prompt_ids == (prompts.ids[0],) * 2 + (prompts.ids[1],) * 2
    assert rollout.truths == (0, 0, 1, 1)
    assert rollout.messages == (*[prompts.messages[0]] * 2, *[prompts.messages[1]] * 2)
    assert [tuple(r) for r in rollout.sequences.prompt_rows()] == [ROWS[0], ROWS[0], ROWS[1], ROWS[1]]
    assert rollout.sequences.trained.flat.all()
    assert rollout.sequences.trained.flat.dtype == torch.bool
    assert rollout.rollout_logp.lens.tolist() == rollout.sequences.response_lens.tolist()
    assert rollout.rollout_logp.flat.dtype == torch.float32
    assert rollout.weights_version.dtype == rollout.group.dtype == rollout.samples.dtype == torch.int64
    assert rollout.finished.dtype == torch.bool
    assert rollout.weights_version.tolist() == [0] * 4


def test_greedy_answers_are_the_same_everywhere(backend, reference):
    prompts = prompts_of(greedy=True, purpose="evaluation")
    ours, want = backend.engine.generate(prompts), reference.generate(prompts)
    assert rows_of(ours) == rows_of(want)
    assert ours.texts == want.texts
    assert ours.finished.tolist() == want.finished.tolist()
    torch.testing.assert_close(ours.rollout_logp.flat, want.rollout_logp.flat, atol=1e-5, rtol=0)


def test_stop_strings_end_the_same_token_everywhere(backend, reference):
    """Every two-character piece of a greedy answer as a stop string, special tokens and the length limit included."""
    prompts = prompts_of(greedy=True, purpose="evaluation")
    free = replace(PARAMS, stop_token_ids=(1,), max_new_tokens=12).with_greedy()
    plain = reference.complete(prompts, free)
    spelled = reference.tokenizer.batch_decode(plain.sequences.response_rows(), clean_up_tokenization_spaces=False)
    pieces = [text[at : at + 2] for text in spelled for at in (1, 5, len(text) - 2)]
    stops = [(piece,) for piece in pieces if piece]
    assert len(stops) > 5
    for stop in stops:
        params = replace(free, stop=stop)
        ours, want = backend.engine.complete(prompts, params), reference.complete(prompts, params)
        assert rows_of(ours) == rows_of(want), stop
        assert ours.finished.tolist() == want.finished.tolist(), stop
        assert ours.texts == want.texts, stop


def test_sampled_logprobs_are_the_trainers(backend):
    rollout = backend.engine.generate(prompts_of(n=4))
    ours = backend.trainer.logprobs(rollout.sequences, 1.0).flat
    torch.testing.assert_close(ours, rollout.rollout_logp.flat, atol=1e-5, rtol=0)
    assert float(ours.abs().max()) > 0.5
    warm = backend.engine.complete(prompts_of(n=4), SamplingParams(temperature=0.6, max_new_tokens=16, n=4))
    ours = backend.trainer.logprobs(warm.sequences, 0.6).flat
    torch.testing.assert_close(ours, warm.rollout_logp.flat, atol=1e-5, rtol=0)


def test_responses_end_at_an_eos_that_is_kept_or_at_the_limit(backend):
    rollout = backend.engine.generate(prompts_of(n=8))
    assert 0 < int(rollout.finished.sum()) < 32
    for (_, _, row), finished in zip(rows_of(rollout), rollout.finished.tolist(), strict=True):
        assert (row[-1] in EOS) == finished
        assert not set(row[:-1]) & set(EOS)
        assert finished or len(row) == 16


def test_a_sample_is_the_same_alone(backend):
    prompts = prompts_of(n=3, step=5)
    whole = rows_of(backend.engine.generate(prompts))
    alone = [rows_of(backend.engine.generate(replace(prompts.select([p]), n=1)))[0] for p in range(4)]
    assert alone == whole[::3]


def test_refusals(backend):
    engine = backend.engine
    with pytest.raises(RolloutError, match="is empty"):
        engine.generate(prompts_of(((),)))
    with pytest.raises(RolloutError, match="top_k=3"):
        engine.complete(prompts_of(), SamplingParams(top_k=3, max_new_tokens=2))
    assert len(engine.complete(ROWS[:2], SamplingParams(top_k=3, max_new_tokens=2, n=2))) == 4
    with pytest.raises(RolloutError, match=r"context is \d+"):
        engine.generate(prompts_of((tuple([5] * 510),)))


def test_carried_responses_are_finished_later(backend):
    prompts = prompts_of(n=3)
    done, carried = backend.partial.generate_partial(prompts, None, 24)
    seen = rows_of(done)
    began = {(s.prompt_id, s.sample): s for s in carried.samples}
    rest, none = backend.partial.generate_partial(prompts_of(()), carried)
    assert none == Carried()
    assert sorted((i, s) for i, s, _ in [*seen, *rows_of(rest)]) == sorted(
        (i, s) for i in prompts.ids for s in range(3)
    )
    for prompt_id, sample, row in rows_of(rest):
        before = began[prompt_id, sample]
        assert tuple(row[: len(before.response)]) == before.response
    ours = backend.trainer.logprobs(rest.sequences, 1.0).flat
    torch.testing.assert_close(ours, rest.rollout_logp.flat, atol=1e-5, rtol=0)
