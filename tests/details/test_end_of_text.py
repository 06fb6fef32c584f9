"""EOS is in the training data, is predicted, is known in all its ids, and has nothing to do with pad."""

from __future__ import annotations

import pytest
import torch

from tutelage.algorithms.sft import SFTLoss
from tutelage.build.data import load_template
from tutelage.config.common import DataConfig, ModelConfig, OptimConfig
from tutelage.data.chat import ChatTemplate
from tutelage.data.prepare import prepare_demonstrations, prepare_pairs
from tutelage.engines.engine import ModelEngine
from tutelage.models.load import load_causal_lm
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Demonstrations

EOS = 2
ROWS = [{"prompt": "tea?", "completion": "it is hot."}, {"prompt": "why", "completion": "so"}]
PAIRS = [{"prompt": "tea?", "chosen": "it is hot.", "rejected": "no"}]


def demonstrations(tokenizer, path, template="plain") -> Demonstrations:
    cfg = DataConfig(train=str(path), eval_fraction=0.0)
    return prepare_demonstrations(cfg, ChatTemplate(tokenizer, template), "assistant", 0).train


@pytest.mark.parametrize("template", ["plain", "chatml"])
@pytest.mark.parametrize("variant", ["pad_is_eos", "pad_is_not_eos", "no_pad"])
def test_demonstrations_end_in_a_trained_eos_whatever_the_pad_token_is(
    variant, template, tokenizer_variants, write_rows
):
    tokenizer = tokenizer_variants[variant]
    batch = demonstrations(tokenizer, write_rows(ROWS), template)
    weights = SFTLoss("token_mean").weights(batch)
    rows = zip(batch.sequences.responses().rows(), batch.sequences.trained.rows(), weights.rows(), strict=True)
    for row, (response, trained, weight) in zip(ROWS, rows, strict=True):
        assert tokenizer.decode(response) == row["completion"] + "<|im_end|>"
        assert response[-1] == EOS
        assert trained.all()
        assert (weight > 0).all()
    assert float(weights.flat.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("variant", ["pad_is_eos", "pad_is_not_eos", "no_pad"])
def test_both_answers_of_a_pair_end_in_eos(variant, tokenizer_variants, write_rows):
    cfg = DataConfig(train=str(write_rows(PAIRS)), eval_fraction=0.0)
    pairs = prepare_pairs(cfg, ChatTemplate(tokenizer_variants[variant], "plain"), 0).train
    assert [side.tokens.flat[-1].item() for side in (pairs.chosen, pairs.rejected)] == [EOS, EOS]


def test_eos_is_predicted_after_training_on_demonstrations(tiny_llama_folder, tiny_tokenizer, write_rows):
    batch = demonstrations(tiny_tokenizer, write_rows(ROWS))
    policy = load_causal_lm(ModelConfig(path=str(tiny_llama_folder)))
    engine = ModelEngine(policy, OptimConfig(lr=5e-3, schedule="constant"), total_updates=60)
    for _ in range(60):
        engine.step(batch, SFTLoss("token_mean"))
    greedy = SamplingParams(greedy=True, max_new_tokens=20)
    rollout = InProcessRollout(policy.model, tiny_tokenizer, (EOS,), greedy, seed=0).complete(
        batch.sequences.prompt_rows(), greedy
    )
    assert rollout.sequences.response_rows() == batch.sequences.response_rows()
    assert rollout.finished.all()


def test_every_eos_id_of_the_model_ends_a_rollout(make_ppo, tiny_llama_two_eos_folder):
    assert load_template(str(tiny_llama_two_eos_folder), None).eos_ids == (EOS, 0)
    sampling = {"samples_per_prompt": 20, "max_new_tokens": 20, "temperature": 2.0}
    built = make_ppo(tiny_llama_two_eos_folder, rollout=sampling)
    rollout = built.roles.actor.generate(built.prompts()).gather()
    ends = set()
    for response, finished in zip(rollout.sequences.response_rows(), rollout.finished.tolist(), strict=True):
        at = [t for t, token in enumerate(response) if token in (EOS, 0)]
        assert at == ([len(response) - 1] if finished else [])
        ends |= {response[-1]} if finished else set()
    assert ends == {EOS, 0}


def test_no_eos_id_is_invented_for_an_encoder(tiny_bert_folder):
    template = load_template(str(tiny_bert_folder), None)
    assert template.eos_ids == ()
    assert template.end_is_structural


def test_the_first_and_the_last_token_of_a_response_are_trained_and_no_token_of_the_prompt(
    tiny_llama_folder, tiny_tokenizer, write_rows
):
    """Which logits the loss pushes on: those that predict response tokens, the first from the last of the prompt."""
    batch = demonstrations(tiny_tokenizer, write_rows(ROWS[:1]))
    policy = load_causal_lm(ModelConfig(path=str(tiny_llama_folder)))
    seen = []
    policy.model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    engine = ModelEngine(policy, OptimConfig())
    engine.step(batch, SFTLoss("token_mean"))
    prompt, whole = int(batch.sequences.prompt_lens[0]), int(batch.sequences.tokens.lens[0])
    with torch.no_grad():
        fresh = load_causal_lm(ModelConfig(path=str(tiny_llama_folder)))
        hidden = fresh.trunk.hidden(batch.sequences.tokens)
    torch.testing.assert_close(seen[0], hidden[prompt - 1 : whole - 1], atol=1e-5, rtol=0)
