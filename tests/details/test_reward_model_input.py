"""What the reward model reads: the sampled tokens where it writes like the policy, else text through its own template;
and the bias that makes the chosen answers of its training data score 0."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tutelage.build import run_recipe
from tutelage.build.data import stage_data
from tutelage.build.stages import build_stage
from tutelage.config import RewardModelConfig, load_checked
from tutelage.config.common import ModelConfig
from tutelage.models.load import load_scalar_model
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet


def shown_to(built, monkeypatch):
    """The sequences that the reward model was given for the first rollouts, and the rollouts."""
    source = built.objects["reward"].mix.sources[0]
    scorer, shown = source.scorer, []

    def watched(sequences):
        shown.append(sequences)
        return scorer(sequences)

    monkeypatch.setattr(source, "scorer", watched)
    batch = built.collect()
    return shown[0], batch


def test_a_reward_model_with_the_policys_tokenizer_and_template_reads_the_sampled_tokens(
    make_ppo, llama_reward_folder, monkeypatch
):
    shown, batch = shown_to(make_ppo(reward={"model": str(llama_reward_folder), "rules": []}), monkeypatch)
    assert torch.equal(shown.tokens.flat, batch.sequences.tokens.flat)


def test_a_reward_model_with_another_tokenizer_reads_text_in_its_own_tokens(make_ppo, bert_reward_folder):
    built = make_ppo(reward={"model": str(bert_reward_folder), "rules": []})
    batch = built.collect()
    tokenizer = AutoTokenizer.from_pretrained(bert_reward_folder)
    model = AutoModel.from_pretrained(bert_reward_folder, add_pooling_layer=False).eval()
    score = built.engine("reward").model.score
    expected = []
    for messages, text in zip(batch.messages, batch.texts, strict=True):
        pieces = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (messages[0]["content"], text)]
        ids = [tokenizer.cls_token_id, *pieces[0], *pieces[1], tokenizer.sep_token_id]
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
            expected.append(float(hidden @ score.weight[0] + score.bias[0]))
    assert batch.score.total.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_same_tokenizer_with_another_template_is_rendered_too(
    make_ppo, llama_reward_folder, tiny_tokenizer, tmp_path, monkeypatch
):
    shutil.copytree(llama_reward_folder, tmp_path / "hh")
    (tmp_path / "hh" / "tutelage_template.json").write_text(json.dumps({"chat_template": "hh"}))
    shown, batch = shown_to(make_ppo(reward={"model": str(tmp_path / "hh"), "rules": []}), monkeypatch)
    for tokens, messages, text in zip(shown.tokens.rows(), batch.messages, batch.texts, strict=True):
        decoded = tiny_tokenizer.decode(tokens)
        assert decoded.removesuffix("<|im_end|>") == f"\n\nHuman: {messages[0]['content']}\n\nAssistant: {text}"


def test_a_model_that_is_kept_scores_its_chosen_answers_zero_on_average(tiny_llama_folder, write_rows, tmp_path):
    answers = [
        ("tea", "it is hot.", "no"),
        ("why", "so it is", "no no"),
        ("a map", "it is here.", "what"),
        ("x", "y", "z"),
    ]
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in answers]
    cfg = RewardModelConfig.model_validate(
        {
            "model": {"path": str(tiny_llama_folder)},
            "data": {"train": str(write_rows(rows)), "eval_fraction": 0.0},
            "optim": {"tokens_per_micro_batch": 64},
        }
    )
    data = stage_data(cfg)
    stage = build_stage(cfg, data)
    roles = RoleSet(LocalTransport().start(stage.builder, stage.names)[0])
    chosen = data.prepared.train.chosen
    before = roles.reward.scores(chosen).gather().double()
    assert abs(float(before.mean())) > 0.05
    roles.reward.save_pretrained(tmp_path / "kept").gather()
    kept = load_scalar_model(ModelConfig(path=str(tmp_path / "kept")), "reward")
    with torch.no_grad():
        after = kept.scores(chosen.tokens).double()
    assert float(after.mean()) == pytest.approx(0.0, abs=1e-5)
    torch.testing.assert_close(after - before, torch.full_like(after, -float(before.mean())), atol=1e-5, rtol=0)
    assert torch.equal(roles.reward.scores(chosen).gather().double(), before)


def test_a_best_model_that_was_kept_before_the_end_is_centred_too(tiny_llama_folder, write_rows, tmp_path):
    topics = ("tea", "cats", "rain", "maps", "snow", "trees", "the sea", "bikes", "bread", "music")
    rows = [{"prompt": f"what is {t}", "chosen": f"it is {t}.", "rejected": "no no no"} for t in topics]
    (tmp_path / "recipe.yaml").write_text("algorithm: reward_model\n")
    wanted = [
        f"output_dir={tmp_path}",
        f"model.path={tiny_llama_folder}",
        f"data.train={write_rows(rows)}",
        "data.eval_fraction=0.3",
        "reward_model.batch_size=4",
        "reward_model.epochs=4",
        "optim.lr=1e-3",
        "evaluation.every=1",
    ]
    loaded, _ = load_checked(str(tmp_path / "recipe.yaml"), wanted)
    result = run_recipe(loaded, "plain")
    kept = json.loads((result.folder / "checkpoints" / "best" / "quality.json").read_text())
    assert kept["step"] < result.summary["steps"], "the best model must be one from before the end for this test"
    best = load_scalar_model(ModelConfig(path=str(result.best_model)), "reward")
    with torch.no_grad():
        chosen = best.scores(stage_data(loaded.config).prepared.train.chosen.tokens)
    assert float(chosen.mean()) == pytest.approx(0.0, abs=1e-4)
