"""PPO with its critic on the actor's trunk: it learns, resumes exactly, holds one model fewer; what is refused."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tutelage.build import check_recipe, resume_run
from tutelage.config import load_checked
from tutelage.errors import ConfigError
from tutelage.reports.metrics_log import read_events, read_metrics

VOLATILE = ("time", "memory/")
TRUNK = "critic.trunk=actor"


def lasting(folder):
    """Metrics by step without what depends on the clock or the machine."""
    rows = read_metrics(folder)
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows]


def test_a_run_learns_with_one_model_and_one_learner(run, ppo_overrides):
    settings = ("max_steps=30", "epochs=12", "optim.lr=5e-4", "kl.coef=0.02")
    shared = run("ppo", *ppo_overrides, TRUNK, *settings)
    rows = [row for row in lasting(shared.folder) if "value/error" in row]

    def mean(key, part):
        return sum(row[key] for row in part) / len(part)

    assert len(rows) == 30
    assert mean("value/error", rows[-5:]) < 0.5 * mean("value/error", rows[:5])
    assert mean("reward/score_mean", rows[-5:]) > mean("reward/score_mean", rows[:5]) + 0.5
    assert {"policy/clip_fraction", "policy/grad_norm", "value/clip_fraction"} <= rows[0].keys()
    assert not {"value/grad_norm", "value/loss", "policy/actor/entropy"} & rows[0].keys()
    step = shared.folder / "checkpoints/step_000030"
    assert not (step / "critic").exists()
    assert "weights/value_head.weight" in load_file(step / "actor/rank_00000.safetensors")
    exported = load_file(next(shared.best_model.rglob("model.safetensors")))
    assert not [name for name in exported if "value" in name]
    AutoModelForCausalLM.from_pretrained(shared.best_model)
    assert "value head on the actor's trunk" in " ".join(e["message"] for e in read_events(shared.folder))


@pytest.mark.parametrize("extra", [(), ("model.lora_rank=4", "critic.detach_trunk=true")], ids=["full", "lora"])
def test_a_resumed_run_repeats_the_rest_exactly(run, ppo_overrides, extra):
    result = run("ppo", *ppo_overrides, TRUNK, "checkpoint.every=2", *extra)
    file = result.folder / "checkpoints/step_000004/actor/rank_00000.safetensors"
    metrics, before = lasting(result.folder), load_file(file)
    shutil.rmtree(result.folder / "checkpoints/step_000004")
    shutil.rmtree(result.folder / "checkpoints/best")
    (result.folder / "summary.json").unlink()
    assert resume_run(result.folder, "plain").summary["after"] == result.summary["after"]
    assert lasting(result.folder) == metrics
    after = load_file(file)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["critic.trunk=actor", "critic.init=policy"], "critic.init has no effect"),
        (["critic.trunk=actor", "critic.lr=0.1"], "critic.lr has no effect"),
        (["critic.detach_trunk=true"], "critic.detach_trunk has no effect"),
        (["critic.trunk=actor", "cluster.transport=ray"], "cluster.transport is ray"),
        (["critic.trunk=actor", "model.lora_rank=2", "model.shared_base=true"], "model.shared_base is true"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides, said, tmp_path):
    (tmp_path / "r.yaml").write_text("algorithm: ppo\nmodel: {path: m}\ndata: {train: t}\nreward: {model: r}\n")
    with pytest.raises(ConfigError) as error:
        load_checked(str(tmp_path / "r.yaml"), overrides)
    assert said in str(error.value)


def test_a_policy_loss_of_the_whole_mini_batch_is_refused_before_anything_is_loaded(ppo_overrides, tmp_path):
    (tmp_path / "r.yaml").write_text("algorithm: ppo\n")
    loaded = load_checked(str(tmp_path / "r.yaml"), [*ppo_overrides, TRUNK, "policy_loss.kind=clip_cov"])[0]
    with pytest.raises(ConfigError, match=r"critic\.trunk is actor and policy_loss\.kind is clip_cov"):
        check_recipe(loaded)
