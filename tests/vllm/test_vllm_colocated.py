"""An engine in this process: its samples, its weights, its order of sleep, and partial rollouts."""

from __future__ import annotations

import os
import pickle
import random
from dataclasses import replace

import pytest
import torch
from vllm_kit import ROWS, gap, moved, prompts_of, rows_of, running, spec_of, trainer_of, weights_of

from tutelage.errors import RolloutError
from tutelage.rollout.sampling import SamplingParams
from tutelage.rollout.vllm.environment import engine_variables

pytestmark = pytest.mark.vllm
PROMPTS = prompts_of(n=3, step=5)


@pytest.fixture(scope="module")
def folder(tiny_llama_folder):
    return tiny_llama_folder


@pytest.fixture(scope="module")
def engine(folder, tiny_tokenizer):
    with running(spec_of(folder, tiny_tokenizer)) as rollout:
        yield rollout


@pytest.fixture
def trainer(engine, folder):
    """On the weights of the folder, which are put into the engine too."""
    trainer = trainer_of(folder)
    engine.load_weights(weights_of(trainer).items(), 0)
    return trainer


def test_the_ratio_of_the_first_update_is_one(engine, trainer):
    rollout = engine.generate(PROMPTS)
    assert rollout.weights_version.tolist() == [0] * 12
    assert float(rollout.rollout_logp.flat.abs().max()) > 0.5
    assert gap(trainer, rollout) < 1e-5


def test_a_sample_does_not_depend_on_its_batch(engine, trainer):
    whole = rows_of(engine.generate(PROMPTS))
    reordered = rows_of(engine.generate(PROMPTS.select([3, 1, 0, 2])))
    assert sorted(reordered) == sorted(whole)
    alone = [rows_of(engine.generate(replace(PROMPTS.select([p]), n=1)))[0] for p in range(4)]
    assert alone == whole[::3]
    assert len({tuple(row) for _, _, row in whole}) == 12


def test_randomness_is_keyed(engine, trainer):
    base = prompts_of(ROWS[:1])

    def sample(prompts, **params):
        return engine.complete(prompts, SamplingParams(temperature=0.7, max_new_tokens=12, **params))

    first = rows_of(sample(base))[0][2]
    others = [
        sample(replace(base, step=1)),
        sample(replace(base, ids=("other",))),
        sample(replace(base, purpose="evaluation")),
        sample(base, seed=4),
    ]
    assert all(rows_of(other)[0][2] != first for other in others)
    assert rows_of(sample(base, seed=3))[0][2] == first


def test_first_tokens_follow_the_models_distribution(engine, trainer):
    """2,000 first tokens against the exact softmax of the trainer's model (chi-square over the likely tokens)."""
    from scipy import stats

    rollout = engine.complete(prompts_of(ROWS[2:3]), SamplingParams(temperature=0.7, max_new_tokens=1, n=2000))
    with torch.no_grad():
        logits = trainer.model.module(torch.tensor([ROWS[2]]), cu_seq_lens_q=torch.tensor([0, 8]), use_cache=False)
    probs = torch.softmax(logits.logits[0, -1].double() / 0.7, -1)
    seen = torch.bincount(rollout.sequences.responses().flat, minlength=len(probs)).double()
    common = probs > 10 / 2000
    seen_bins = [*seen[common].tolist(), seen[~common].sum().item()]
    want_bins = [*(probs[common] * 2000).tolist(), (probs[~common].sum() * 2000).item()]
    assert len(seen_bins) > 5
    assert stats.chisquare(seen_bins, want_bins).pvalue > 1e-3


def test_published_weights_are_used_and_named(engine, trainer):
    """The embedding is tied: its head is sent along, or logprobs would be off by 0.1."""
    before = rows_of(engine.generate(PROMPTS))
    moved(trainer, 1)
    engine.load_weights(weights_of(trainer).items(), 7)
    engine.publish(7)
    rollout = engine.generate(PROMPTS)
    assert rollout.weights_version.tolist() == [7] * 12
    assert gap(trainer, rollout) < 1e-5
    assert rows_of(rollout) != before


def test_a_folder_brings_its_tied_head(engine, trainer, tmp_path):
    moved(trainer, 5).save_pretrained(tmp_path)
    engine.load_folder(str(tmp_path), 9)
    rollout = engine.generate(PROMPTS)
    assert rollout.weights_version.tolist() == [9] * 12
    assert gap(trainer, rollout) < 1e-5


def test_rest_sleeps_where_the_settings_say_so(engine, trainer):
    engine.rest()
    assert len(engine.generate(PROMPTS)) == 12  # sleep_level 0


def test_a_source_is_asked_at_every_publication(engine, trainer):
    engine.source = lambda: weights_of(moved(trainer, 2)).items()
    try:
        engine.publish(8)
    finally:
        engine.source = None
    assert gap(trainer, engine.generate(PROMPTS)) < 1e-5
    with pytest.raises(RolloutError, match="version 9 is published, but the engine's weights are of version 8"):
        engine.publish(9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("model.norm.weight"), "1 of the engine's .* not published, such as 'model.norm.weight'"),
        (lambda w: w.update({"model.norm.wieght": w.pop("model.norm.weight")}), "Did you mean model.norm.weight"),
        (lambda w: w.update({"model.embed_tokens.weight": torch.zeros(120, 64)}), r"\(120, 64\) in the policy"),
        (
            lambda w: w.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(1, 64)}),
            r"\(1, 64\) in the",
        ),
    ],
    ids=["missing", "unknown", "another-vocabulary", "half-a-layer"],
)
def test_a_wrong_set_of_weights_is_refused_and_nothing_is_generated_after_it(engine, trainer, change, said):
    wrong = weights_of(trainer)
    change(wrong)
    with pytest.raises(RolloutError, match=said):
        engine.load_weights(wrong.items(), 5)
    with pytest.raises(RolloutError, match="no weights of a known version"):
        engine.generate(PROMPTS)
    engine.load_weights(weights_of(trainer).items(), 6)
    assert gap(trainer, engine.generate(PROMPTS)) < 1e-5


def test_sleep_and_wake_keep_their_order(engine, trainer):
    engine.sleep(2)
    for early in (lambda: engine.generate(PROMPTS), lambda: engine.wake("kv_cache"), engine.trainer_freed):
        with pytest.raises(RolloutError, match="the order is sleep, wake weights, publish"):
            early()
    engine.wake("weights")
    with pytest.raises(RolloutError, match="cannot free the trainer's memory"):
        engine.trainer_freed()
    engine.load_weights(weights_of(moved(trainer, 3)).items(), 11)
    with pytest.raises(RolloutError, match="cannot wake the KV cache"):
        engine.wake("kv_cache")
    engine.trainer_freed()
    engine.wake("kv_cache")
    assert gap(trainer, engine.generate(PROMPTS)) < 1e-5


def test_partial_rollouts_go_on_under_new_weights(engine, trainer):
    """Each token's logprob is that of the weights that sampled it."""
    old = trainer_of(engine.spec.model)
    done, carried = engine.generate_partial(PROMPTS, None, 12 * 4)
    assert len(done) + len(carried) == 12
    assert len(carried) > 6
    engine.load_weights(weights_of(moved(trainer, 4)).items(), 1)
    rest, none = engine.generate_partial(prompts_of([]), pickle.loads(pickle.dumps(carried)))
    assert len(none) == 0
    assert [s.prompt_id for s in carried.samples] == list(rest.prompt_ids)
    assert set(rest.weights_version.tolist()) == {0}
    old_rows = old.logprobs(rest.sequences, 0.7).rows()
    new_rows = trainer.logprobs(rest.sequences, 0.7).rows()
    for sample, got, before, after in zip(carried.samples, rest.rollout_logp.rows(), old_rows, new_rows, strict=True):
        cut = len(sample.response)
        torch.testing.assert_close(got[:cut], before[:cut], atol=1e-5, rtol=0)
        torch.testing.assert_close(got[cut:], after[cut:], atol=1e-5, rtol=0)
    assert {0 < len(s.response) < len(row) for s, row in zip(carried.samples, old_rows, strict=True)} == {True}


def test_a_partial_rollout_stops_when_told(engine, trainer):
    calls = []
    _, carried = engine.generate_partial(PROMPTS, None, None, lambda: calls.append(1) or len(calls) > 3)
    assert 0 < carried.tokens <= 36
    whole, none = engine.generate_partial(PROMPTS)
    assert rows_of(whole) == rows_of(engine.generate(PROMPTS))
    assert len(none) == 0


def test_logits_that_are_not_finite_name_the_prompt(engine, trainer):
    broken = weights_of(trainer)
    broken["model.norm.weight"] = torch.full_like(broken["model.norm.weight"], float("nan"))
    engine.load_weights(broken.items(), 1)
    with pytest.raises(RolloutError, match=r"logits for prompt 'p\S+' are not finite at response token 0"):
        engine.generate(PROMPTS)


def test_progress_is_told(engine, trainer):
    seen = []
    engine.complete(PROMPTS, SamplingParams(temperature=0.7, max_new_tokens=4, n=3), lambda *c: seen.append(c))
    assert seen == [(i, 12) for i in range(1, 13)]


def test_what_cannot_be_served_is_refused_before_it_runs(engine, trainer):
    with pytest.raises(RolloutError, match="has 60 tokens and may get 12 more: 72, the engine's context is 64"):
        engine.generate(prompts_of([[5] * 60]))
    with pytest.raises(RolloutError, match="'p' is empty"):
        engine.generate(prompts_of([[]]))
    cut = SamplingParams(temperature=0.7, top_k=3, max_new_tokens=2)
    with pytest.raises(RolloutError, match="top_k=3"):
        engine.complete(PROMPTS, cut)
    assert len(engine.complete(replace(PROMPTS, purpose="evaluation"), cut)) == 4
    with pytest.raises(RolloutError, match="min_p before top_p"):
        engine.complete(replace(PROMPTS, purpose="evaluation"), replace(cut, top_k=None, top_p=0.5, min_p=0.1))


def test_truncated_logprobs_are_renormalised(engine, trainer):
    answers = engine.complete(
        replace(PROMPTS, purpose="evaluation"), SamplingParams(temperature=0.7, top_k=1, max_new_tokens=5)
    )
    greedy = engine.complete(
        replace(PROMPTS, purpose="evaluation"), SamplingParams(temperature=0.7, greedy=True, max_new_tokens=5)
    )
    assert rows_of(answers) == rows_of(greedy)
    assert float(answers.rollout_logp.flat.abs().max()) < 1e-6


def test_generation_leaves_the_trainers_process_as_it_was(engine, trainer):
    state, python = torch.get_rng_state(), random.getstate()
    engine.generate(PROMPTS)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert "vllm" not in os.environ.get("LD_PRELOAD", "")
    assert "LOCAL_WORLD_SIZE" not in os.environ
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert engine_variables(engine.spec.config, "cpu")["VLLM_LOGGING_LEVEL"] == "ERROR"


def test_specs_are_picklable(engine):
    again = pickle.loads(pickle.dumps(engine.spec))
    assert again.params == engine.spec.params
    assert again.config == engine.spec.config
