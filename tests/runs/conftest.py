"""Small data files and one run of each stage on the tiny models, shared by the tests of whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tutelage.build import RunResult, run_recipe
from tutelage.config import load_checked

TOPICS = ["tea", "cats", "rain", "bread", "music", "the sea", "bikes", "trees", "maps", "snow"]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    """demonstrations, preferences and prompts of a small task: answers that name the topic are preferred."""
    folder = tmp_path_factory.mktemp("data")
    prompts = [f"{verb} {topic}" for verb in ("tell me of", "what is", "why") for topic in TOPICS]
    demos = [{"prompt": p, "completion": f"it is {p.split()[-1]}."} for p in prompts]
    pairs = [{"prompt": p, "chosen": f"it is {p.split()[-1]}.", "rejected": "no no no"} for p in prompts]
    return {
        "demonstrations": write_jsonl(folder / "demonstrations.jsonl", demos),
        "preferences": write_jsonl(folder / "preferences.jsonl", pairs),
        "prompts": write_jsonl(folder / "prompts.jsonl", [{"prompt": p} for p in prompts]),
    }


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Callable[..., RunResult]:
    """run(algorithm, overrides...): train; a later override replaces an earlier one; every run has its own folder."""

    def start(algorithm: str, *overrides: str) -> RunResult:
        folder = tmp_path_factory.mktemp("runs")
        recipe = folder / "recipe.yaml"
        recipe.write_text(f"algorithm: {algorithm}\nname: {algorithm}\n")
        last = {text.split("=", 1)[0]: text for text in [f"output_dir={folder}", *overrides]}
        loaded, _ = load_checked(str(recipe), list(last.values()))
        return run_recipe(loaded, "plain")

    return start


@pytest.fixture(scope="session")
def sft_run(run, files, tiny_llama_folder) -> RunResult:
    return run(
        "sft",
        f"model.path={tiny_llama_folder}",
        f"data.train={files['demonstrations']}",
        "sft.batch_size=8",
        "sft.epochs=4",
        "optim.lr=3e-3",
    )


@pytest.fixture(scope="session")
def reward_run(run, files, sft_run) -> RunResult:
    return run(
        "reward_model",
        f"model.path={sft_run.best_model}",
        f"data.train={files['preferences']}",
        "reward_model.batch_size=8",
        "reward_model.epochs=3",
        "optim.lr=1e-3",
        "optim.weight_decay=0.1",
    )


@pytest.fixture(scope="session")
def ppo_overrides(files, sft_run, reward_run) -> list[str]:
    return [
        f"model.path={sft_run.best_model}",
        f"reward.model={reward_run.best_model}",
        f"data.train={files['prompts']}",
        "rollout.prompts_per_step=8",
        "rollout.max_new_tokens=12",
        "ppo.epochs=2",
        "ppo.minibatches=2",
        "optim.lr=1e-3",
        "evaluation.prompts=6",
        "max_steps=4",
        "epochs=2",
    ]
