"""Sampling from two models as one, against the distribution computed from full forwards, token by token."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from rollout_kit import PROMPTS, make_engine, make_model, make_prompts, plain_twin, rows_of

from tutelage.errors import RolloutError, ShapeError
from tutelage.math.keyed import keyed_uniform, sample_key
from tutelage.roles.reference import Reference
from tutelage.rollout.duels import duels
from tutelage.rollout.inprocess.mixture import GeometricMixture
from tutelage.transport.ray.rows import assemble
from tutelage.transport.ray.rows import rows_of as rows_of_value
from tutelage.transport.ray.split import reply_places, row_plan, with_global_groups


def mixture_probabilities(twins, prefix: list[int], coef: float, temperature: float) -> torch.Tensor:
    """(V,) p^(1 - c) q^c, normalised, after `prefix`: by a full forward of plain transformers, in float64."""
    with torch.no_grad():
        p, q = (torch.softmax(twin(torch.tensor([prefix])).logits[0, -1].double() / temperature, -1) for twin in twins)
    weight = p ** (1.0 - coef) * q**coef
    return weight / weight.sum()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("coef", [0.0, 0.25, 1.0])
def test_every_token_is_drawn_from_the_mixture_and_its_logprob_is_the_mixtures_own(kind, coef, byte_tokenizer):
    policy, reference = make_model(kind, seed=0), make_model(kind, seed=1)
    twins = [plain_twin(policy), plain_twin(reference)]
    engine = make_engine(GeometricMixture(policy, reference, coef), byte_tokenizer, max_new_tokens=8)
    prompts = make_prompts(PROMPTS, n=2, step=4)
    rollout = engine.generate(prompts)
    logps, lens = rollout.rollout_logp.rows(), rollout.sequences.prompt_lens.tolist()
    for b, tokens in enumerate(rollout.sequences.tokens.rows()):
        key = torch.tensor([sample_key(3, 4, rollout.prompt_ids[b], int(rollout.samples[b]), "rollout")])
        for t, token in enumerate(tokens[lens[b] :].tolist()):
            p = mixture_probabilities(twins, tokens[: lens[b] + t].tolist(), coef, 0.7)
            assert float(logps[b][t]) == pytest.approx(float(p[token].log()), abs=2e-5)
            draw, below = float(keyed_uniform(key, torch.tensor([t]))), float(p[:token].sum())
            assert below - 1e-4 <= draw <= below + float(p[token]) + 1e-4, "another token was due"


def test_the_mixture_is_neither_of_its_models(byte_tokenizer):
    policy, reference = make_model("llama", seed=0), make_model("llama", seed=1)
    prompts = make_prompts(PROMPTS, n=4)
    found = [
        rows_of(make_engine(model, byte_tokenizer).generate(prompts))
        for model in (policy, reference, GeometricMixture(policy, reference, 0.5))
    ]
    assert found[0] != found[1]
    assert found[2] not in found[:2]
    alone = rows_of(make_engine(GeometricMixture(policy, reference, 0.0), byte_tokenizer).generate(prompts))
    assert alone == found[0]
    other = rows_of(make_engine(GeometricMixture(policy, reference, 1.0), byte_tokenizer).generate(prompts))
    assert other == found[1]


def test_a_sample_of_the_mixture_does_not_depend_on_its_batch_or_wave(byte_tokenizer):
    """Rows that end early are compacted away in the slots of both models."""
    policy, reference = make_model("llama", seed=0), make_model("llama", seed=1)
    mixture, ends = GeometricMixture(policy, reference, 0.4), tuple(range(0, 256, 9))
    prompts = make_prompts(PROMPTS, n=6, step=2)
    whole = make_engine(mixture, byte_tokenizer, eos_ids=ends, max_new_tokens=20).generate(prompts)
    assert len(set(whole.sequences.response_lens.tolist())) > 4
    small = make_engine(mixture, byte_tokenizer, eos_ids=ends, max_new_tokens=20, tokens_in_flight=64, prefill_tokens=4)
    again = small.generate(prompts)
    assert rows_of(again) == rows_of(whole)
    torch.testing.assert_close(again.rollout_logp.flat, whole.rollout_logp.flat, atol=1e-5, rtol=0)
    alone = make_engine(mixture, byte_tokenizer, eos_ids=ends, max_new_tokens=20).generate(prompts.select([2]))
    assert rows_of(alone) == rows_of(whole)[12:18]


def test_the_reference_runs_in_its_own_context_and_the_policy_does_not(byte_tokenizer):
    """As with an adapter that is switched off: one module, two sets of weights."""
    model, inside, seen = make_model("llama"), [False], []

    @contextmanager
    def switched():
        inside[0] = True
        yield
        inside[0] = False

    handle = model.register_forward_pre_hook(lambda *_: seen.append(inside[0]))
    make_engine(GeometricMixture(model, model, 0.5, switched), byte_tokenizer, max_new_tokens=3).generate(
        make_prompts(PROMPTS)
    )
    handle.remove()
    assert seen == [False, True] * (len(seen) // 2)
    assert seen


def test_modes_are_put_back_and_no_gradient_is_recorded(byte_tokenizer):
    policy, reference = make_model("llama", seed=0).train(), make_model("llama", seed=1)
    mixture = GeometricMixture(policy, reference, 0.5)
    rollout = make_engine(mixture, byte_tokenizer).generate(make_prompts(PROMPTS))
    assert policy.training
    assert not rollout.rollout_logp.flat.requires_grad


def test_two_vocabularies_cannot_be_mixed():
    policy, reference = make_model("llama"), make_model("gpt2")
    reference.config.vocab_size = 12
    with pytest.raises(RolloutError, match="259 and 12 tokens in their vocabularies"):
        GeometricMixture(policy, reference, 0.5)


# ---- duels ----


def test_a_pair_stands_together_and_ages_with_the_policy(byte_tokenizer):
    own_engine = make_engine(make_model("llama", seed=0), byte_tokenizer)
    own_engine.publish(7)
    prompts = make_prompts(PROMPTS, n=2)
    own = own_engine.generate(prompts)
    rival = make_engine(make_model("llama", seed=1), byte_tokenizer).generate(prompts.adding(purpose="rival"))
    both = duels(own, rival)
    assert rows_of(both)[0::2] == rows_of(own)
    assert rows_of(both)[1::2] == rows_of(rival)
    assert both.group.tolist() == [b for b in range(8) for _ in range(2)]
    assert both.weights_version.tolist() == [7] * 16
    mixed = [*own.rollout_logp.rows(), *rival.rollout_logp.rows()]
    for row, logp in enumerate(both.rollout_logp.rows()):
        torch.testing.assert_close(logp, mixed[row // 2 + (row % 2) * 8])


def test_responses_to_other_prompts_are_no_pair(byte_tokenizer):
    rollout = make_engine(make_model("llama"), byte_tokenizer).generate(make_prompts(PROMPTS))
    with pytest.raises(ShapeError, match="answer different prompts"):
        duels(rollout, rollout.select(torch.tensor([1, 0, 2, 3])))


def test_the_same_model_draws_apart_for_the_other_side(byte_tokenizer):
    engine, prompts = make_engine(make_model("llama"), byte_tokenizer), make_prompts(PROMPTS, n=2)
    own, rival = engine.generate(prompts), engine.generate(prompts.adding(purpose="rival"))
    assert all(a != b for a, b in zip(rows_of(own), rows_of(rival), strict=True))


def test_pairs_that_ranks_made_apart_are_those_of_one_rank(byte_tokenizer):
    """As a transport cuts the call over two ranks and joins their replies: row-wise, two rows for each."""
    prompts = make_prompts(PROMPTS, n=2)
    own = make_engine(make_model("llama", seed=0), byte_tokenizer).generate(prompts)
    rival = make_engine(make_model("llama", seed=1), byte_tokenizer).generate(prompts.adding(purpose="rival"))
    plan = row_plan("reference.beside", [rows_of_value(own), rows_of_value(rival)], 2)
    assert plan.split == (True, True)
    replies, places = [], []
    for part in plan.parts:
        reply = with_global_groups(duels(own.select(part.index), rival.select(part.index)), part)
        replies.append(reply)
        places.append(reply_places("reference.beside", Reference.DISPATCH["beside"], part, reply))
    joined = assemble(lambda numbers: [replies[k] for k in numbers], places, None)
    whole = duels(own, rival)
    assert rows_of(joined) == rows_of(whole)
    assert joined.group.tolist() == whole.group.tolist()
