"""Reward and value heads: initialisation, folders, transformers' classifiers, critics from reward models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import model_kit as kit
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    DistilBertForSequenceClassification,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tutelage.config.common import ModelConfig
from tutelage.errors import ModelError
from tutelage.models.forward import values_with_bootstrap
from tutelage.models.heads import fresh_head
from tutelage.models.load import load_causal_lm, load_scalar_model, value_from

CLASSIFIERS = {
    "llama": LlamaForSequenceClassification,
    "gpt2": GPT2ForSequenceClassification,
    "bert": BertForSequenceClassification,
    "distilbert": DistilBertForSequenceClassification,
}


def settings(path: Path | str, **changes: object) -> ModelConfig:
    return ModelConfig(path=str(path), **changes)


def load(path: Path | str, kind: str = "reward", pooling: str = "auto", **changes: object):
    needs_head = bool(changes.pop("needs_head", False))
    return load_scalar_model(
        settings(path, **changes), kind, pooling, tokenizer=kit.WordTokenizer(), needs_head=needs_head
    )


@pytest.fixture
def folder(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_reward_heads_start_at_one_over_root_d_plus_one():
    layer = fresh_head("reward", 20_000, "last").layers["score"]
    std, expected = float(layer.weight.detach().std()), 1 / math.sqrt(20_001)
    assert abs(std / expected - 1) < 4 / math.sqrt(2 * 20_000)
    assert float(layer.bias.detach().abs().max()) == 0


def test_value_heads_start_near_zero():
    layer = fresh_head("value", 20_000, "last").layers["score"]
    assert abs(float(layer.weight.detach().std()) / 1e-3 - 1) < 0.02
    assert float(layer.bias.detach().abs().max()) == 0


def test_a_new_critic_predicts_almost_nothing(folder):
    values = values_with_bootstrap(load(folder, "value"), kit.sequences()).flat
    assert float(values.detach().abs().max()) < 0.1


def test_heads_depend_on_their_seed_alone():
    torch.manual_seed(1)
    first = fresh_head("reward", 64, "last", seed=5).layers["score"].weight
    torch.manual_seed(2)
    assert torch.equal(first, fresh_head("reward", 64, "last", seed=5).layers["score"].weight)
    assert not torch.equal(first, fresh_head("reward", 64, "last", seed=6).layers["score"].weight)


@pytest.mark.parametrize("kind", [*kit.DECODERS, *kit.ENCODERS])
def test_pooling_auto_is_last_for_decoders_and_mean_for_encoders(kind, tmp_path):
    kit.build(kind).save_pretrained(tmp_path / "m")
    assert load(tmp_path / "m").pooling == ("last" if kind in kit.DECODERS else "mean")


@pytest.mark.parametrize("kind", [*kit.DECODERS, *kit.ENCODERS])
def test_a_saved_reward_model_scores_the_same_bit_for_bit(kind, tmp_path):
    kit.build(kind).save_pretrained(tmp_path / "m")
    model = load(tmp_path / "m")
    with torch.no_grad():
        model.score.bias.fill_(0.25)
    tokens = kit.sequences().tokens
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", needs_head=True)
    assert torch.equal(model.scores(tokens), again.scores(tokens))
    held = load_file(tmp_path / "saved" / "model.safetensors")
    assert held["score.weight"].shape == (1, 64)
    assert float(held["score.bias"]) == 0.25
    about = json.loads((tmp_path / "saved" / "tutelage_head.json").read_text())
    assert (about["kind"], about["pooling"]) == ("reward", model.pooling)


def test_transformers_opens_the_folder(folder, tmp_path):
    model = load(folder)
    model.save_pretrained(tmp_path / "saved")
    row = kit.sequences().tokens.rows()[2]
    backbone = AutoModel.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        h = backbone(input_ids=row[None]).last_hidden_state[0, -1]
        score = model.scores(kit.sequences().tokens)[2]
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", num_labels=1)
    torch.testing.assert_close(h @ model.score.weight[0], score, atol=1e-5, rtol=0)
    assert torch.equal(classifier.score.weight, model.score.weight)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classifiers_of_transformers_score_as_they_do_there(kind, tmp_path):
    config = kit.build(kind, num_labels=1).config
    torch.manual_seed(3)
    theirs = CLASSIFIERS[kind](config).eval()
    theirs.save_pretrained(tmp_path / "m")
    model = load(tmp_path / "m", needs_head=True)
    seqs = kit.sequences()
    with (
        torch.no_grad()
    ):  # pad_token_id 2 ends every row there, so transformers is asked without its search for padding
        theirs.config.pad_token_id = None
        expected = torch.stack([theirs(input_ids=row[None]).logits[0, 0] for row in seqs.tokens.rows()])
        got = model.scores(seqs.tokens)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "ours", needs_head=True).scores(seqs.tokens), got)


def test_a_roberta_classifier_scores_as_it_does_there(tmp_path):
    config = RobertaConfig(
        vocab_size=90,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=66,
        pad_token_id=1,
        num_labels=1,
        initializer_range=0.2,
    )
    torch.manual_seed(3)
    theirs = RobertaForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path / "m")
    rows = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    with torch.no_grad():
        expected = torch.stack([theirs(input_ids=torch.tensor([row])).logits[0, 0] for row in rows])
        got = load(tmp_path / "m", needs_head=True).scores(kit.Sequences.build(rows, [[] for _ in rows]).tokens)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    LlamaForSequenceClassification(kit.build("llama", num_labels=2).config).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="classifier of 2 labels"):
        load(tmp_path / "m")


def test_a_language_model_is_no_trained_reward_model(folder):
    with pytest.raises(ModelError, match="has no reward head"):
        load(folder, needs_head=True)


def test_folders_are_not_taken_for_another_role(folder, tmp_path):
    load(folder, "value").save_pretrained(tmp_path / "critic")
    with pytest.raises(ModelError, match="is a critic, not a reward model"):
        load(tmp_path / "critic", "reward")
    load(folder).save_pretrained(tmp_path / "rm")
    with pytest.raises(ModelError, match="is a reward or value model, not a policy"):
        load_causal_lm(settings(tmp_path / "rm"), kit.WordTokenizer())
    with pytest.raises(ModelError, match="trained with 'last' pooling, the recipe says 'mean'"):
        load(tmp_path / "rm", "reward", "mean")


def test_a_broken_head_file_is_an_error(folder, tmp_path):
    load(folder).save_pretrained(tmp_path / "rm")
    (tmp_path / "rm" / "tutelage_head.json").write_text('{"kind": "reward", "pooling": "median"}')
    with pytest.raises(ModelError, match="median"):
        load(tmp_path / "rm")


def test_a_critic_from_a_reward_model_starts_as_a_copy(folder, tmp_path):
    reward = load(folder)
    with torch.no_grad():
        reward.score.bias.fill_(0.5)
    critic = value_from(reward, settings(folder))
    seqs = kit.sequences()
    last = torch.stack([row[-1] for row in values_with_bootstrap(critic, seqs).rows()])
    torch.testing.assert_close(last, reward.scores(seqs.tokens), atol=1e-6, rtol=0)
    with torch.no_grad():
        critic.score.bias.add_(1)
        critic.backbone.layers[0].mlp.up_proj.weight.add_(1)
    assert reward.score.bias.item() == 0.5
    reward.save_pretrained(tmp_path / "rm")
    from_folder = load(tmp_path / "rm", "value")
    again = torch.stack([row[-1] for row in values_with_bootstrap(from_folder, seqs).rows()])
    torch.testing.assert_close(again, last, atol=1e-6, rtol=0)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_critic_from_the_policy_has_its_hidden_states_and_a_small_head(folder, lora_rank):
    policy = load_causal_lm(settings(folder, lora_rank=lora_rank), kit.WordTokenizer())
    if lora_rank:
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.05)
    critic = value_from(policy, settings(folder, lora_rank=lora_rank))
    tokens = kit.sequences().tokens
    torch.testing.assert_close(critic.trunk.hidden(tokens), policy.trunk.hidden(tokens), atol=1e-4, rtol=0)
    assert float(critic.score.weight.detach().abs().max()) < 0.01
    assert (critic.adapted is not None) == bool(lora_rank)


def test_an_encoder_cannot_become_a_critic(tmp_path):
    kit.build("bert").save_pretrained(tmp_path / "m")
    reward = load(tmp_path / "m")
    assert reward.critic_obstacle() == "it is an encoder, whose tokens see what comes after them"
    with pytest.raises(ModelError, match="cannot become a critic"):
        value_from(reward, settings(tmp_path / "m"))
    with pytest.raises(ModelError, match="would see the tokens"):
        load(tmp_path / "m", "value")


def test_a_mean_pooled_or_foreign_reward_model_cannot_become_a_critic(folder):
    assert "mean pooling" in (load(folder, pooling="mean").critic_obstacle() or "")
    reward = load(folder)
    assert reward.critic_obstacle(kit.WordTokenizer()) is None
    assert "another vocabulary" in (reward.critic_obstacle(kit.WordTokenizer(80)) or "")
