"""The three stages on tiny models: what a run leaves behind, and that each stage learns."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tutelage.reports.metrics_log import read_events, read_metrics


def test_sft_lowers_the_held_out_loss_and_leaves_an_ordinary_model_folder(sft_run):
    before, after = sft_run.summary["before"]["eval/loss"], sft_run.summary["after"]["eval/loss"]
    assert after < 0.7 * before
    model = AutoModelForCausalLM.from_pretrained(sft_run.best_model)
    tokenizer = AutoTokenizer.from_pretrained(sft_run.best_model)
    assert model.get_input_embeddings().weight.shape[0] >= len(tokenizer)


def test_reward_model_learns_the_planted_preference_and_is_centred_on_chosen(reward_run):
    assert reward_run.summary["after"]["eval/accuracy"] == pytest.approx(1.0)
    assert json.loads((reward_run.best_model / "centring.json").read_text())["bias_shift"] != 0


def test_a_run_folder_holds_everything_needed_to_understand_and_repeat_it(run, ppo_overrides):
    result = run("ppo", *ppo_overrides)
    names = {p.relative_to(result.folder).as_posix() for p in result.folder.rglob("*") if p.is_file()}
    wanted = {
        "config.yaml",
        "lineage.json",
        "preflight.json",
        "metrics.jsonl",
        "events.jsonl",
        "summary.json",
        "samples/before.jsonl",
        "samples/after.jsonl",
        "figures/rlhf_training_curves.png",
        "figures/reward_comparison.png",
        "report.html",
        "checkpoints/best/model/model.safetensors",
        "checkpoints/best/quality.json",
        "checkpoints/step_000004/state.json",
    }
    assert wanted <= names, wanted - names
    steps = [m for m in read_metrics(result.folder) if "policy/loss" in m]
    assert [m["step"] for m in steps] == [1, 2, 3, 4]
    assert all(m["policy/logp_gap"] < 1e-4 for m in steps)
    assert json.loads((result.folder / "summary.json").read_text())["steps"] == 4


def test_the_first_minibatch_has_ratio_one_at_temperature_0_7(run, ppo_overrides):
    one_update = ["ppo.epochs=1", "ppo.minibatches=1", "rollout.temperature=0.7", "max_steps=1"]
    result = run("ppo", *ppo_overrides, *one_update)
    (step,) = [m for m in read_metrics(result.folder) if "policy/loss" in m]
    assert step["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert step["policy/approx_kl"] == pytest.approx(0.0, abs=1e-8)
    assert step["kl/sequence"] == pytest.approx(0.0, abs=1e-4)


def test_a_warm_up_longer_than_the_run_is_noted_in_the_run_folder(run, files, tiny_llama_folder):
    result = run(
        "sft", f"model.path={tiny_llama_folder}", f"data.train={files['demonstrations']}", "optim.warmup_steps=500"
    )
    notes = [e["message"] for e in read_events(result.folder) if e["kind"] == "model"]
    assert any("optim.warmup_steps is 500, the run has 1 updates" in note for note in notes)
