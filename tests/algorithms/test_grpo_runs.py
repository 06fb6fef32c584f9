"""Whole runs of every estimator on a tiny model; and a run with dynamic sampling that is stopped and goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tutelage.build import resume_run, run_recipe
from tutelage.config import load_checked
from tutelage.math.group_advantages import ESTIMATORS
from tutelage.reports.metrics_log import read_metrics

RULES = """\
def short(prompts, responses, truths):
    return [-0.1 * len(r) for r in responses]

def vowels(prompts, responses, truths):
    return [float(sum(c in "aeiou" for c in r)) for r in responses]

def long(prompts, responses, truths):
    return [float(len(r) > 9) for r in responses]

def even(prompts, responses, truths):
    return [float(sum(map(ord, r)) % 2) for r in responses]
"""


def started(folder: Path, model: Path, *overrides: str) -> Any:
    """Two steps of four prompts with two responses each, rewarded by two rules."""
    rules = folder / "rules.py"
    rules.write_text(RULES)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"tell me of {n}"}) + "\n" for n in range(40)))
    (folder / "recipe.yaml").write_text("algorithm: grpo\nname: grpo\n")
    last = {
        text.split("=", 1)[0]: text
        for text in (
            f"output_dir={folder}",
            f"model.path={model}",
            f"data.train={folder / 'prompts.jsonl'}",
            "data.eval_fraction=0.05",
            f"reward.rules=[{{function: {rules}:short}}, {{function: {rules}:vowels, weight: 0.5}}]",
            "rollout.prompts_per_step=4",
            "rollout.samples_per_prompt=2",
            "rollout.max_new_tokens=6",
            "evaluation.prompts=2",
            "optim.lr=1e-3",
            "max_steps=2",
            *overrides,
        )
    }
    loaded, _ = load_checked(str(folder / "recipe.yaml"), list(last.values()))
    return run_recipe(loaded, "plain")


def lasting(folder: Path) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock or the machine."""
    return [{k: v for k, v in row.items() if not k.startswith(("time", "memory/"))} for row in read_metrics(folder)]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "actor" / "rank_00000.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_recipe_with_each_estimator_trains(name: str, tmp_path: Path, tiny_llama_folder: Path) -> None:
    single = ["rollout.samples_per_prompt=1"] if name in ("remax", "reinforce_plus_plus") else []
    result = started(tmp_path, tiny_llama_folder, f"grpo.estimator={name}", *single)
    rows = [row for row in read_metrics(result.folder) if "policy/loss" in row]
    assert len(rows) == 2
    assert all(row["policy/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_run_with_dynamic_sampling_that_was_stopped_repeats_the_rest_bit_for_bit(
    stream: str, tmp_path: Path, tiny_llama_folder: Path
) -> None:
    result = started(
        tmp_path,
        tiny_llama_folder,
        f"reward.rules=[{{function: {tmp_path}/rules.py:long}}]",
        "kl.coef=0.0",
        "grpo.dynamic_sampling=true",
        "grpo.max_refills=3",
        "grpo.overlong_buffer=2",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "epochs=9",
        "max_steps=3",
        f"schedule.stream={stream}",
    )
    kept = lasting(result.folder)
    assert sum(row.get("schedule/refills", 0) for row in kept) > 0, "some step had to draw again"
    assert any("schedule/groups_given_up" in row for row in kept) == (stream == "true")
    before = weights(result.folder, 3)
    assert any(not torch.equal(before[name], value) for name, value in weights(result.folder, 2).items()), "it learns"
    for step in (2, 3):
        shutil.rmtree(result.folder / "checkpoints" / f"step_{step:06d}")
    shutil.rmtree(result.folder / "checkpoints" / "best")
    (result.folder / "summary.json").unlink()
    resume_run(result.folder, "plain")
    assert lasting(result.folder) == kept
    after = weights(result.folder, 3)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


STREAMED = {
    "groups as they come": [],
    "groups that say something": [
        "reward.rules=[{{function: {folder}/rules.py:even}}]",
        "kl.coef=0.0",
        "grpo.dynamic_sampling=true",
        "grpo.max_refills=3",
        "rollout.samples_per_prompt=3",
        "epochs=9",
        "rollout.tokens_in_flight=160",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STREAMED)
def test_scores_beside_decoding_change_no_weight(case: str, tmp_path: Path, tiny_llama_folder: Path) -> None:
    found = {}
    for stream in ("false", "true"):
        folder = tmp_path / stream
        folder.mkdir()
        settings = [setting.format(folder=folder) for setting in STREAMED[case]]
        result = started(folder, tiny_llama_folder, *settings, "checkpoint.every=2", f"schedule.stream={stream}")
        found[stream] = (weights(result.folder, 2), lasting(result.folder), read_metrics(result.folder))
    (plain, metrics, _), (streamed, others, timed) = found["false"], found["true"]
    assert plain.keys() == streamed.keys()
    assert all(torch.equal(plain[name], streamed[name]) for name in plain)
    assert any("time/actor/next_part" in row and row["time/rollout_s"] > 0 for row in timed)
    given_up = sum(row.get("schedule/groups_given_up", 0) for row in others)
    if not STREAMED[case]:
        assert others == metrics
    else:
        assert given_up > 0
        for mine, theirs in zip(others, metrics, strict=True):
            assert all(
                mine[name] == value for name, value in theirs.items() if name.startswith(("policy/", "rollout/"))
            )
