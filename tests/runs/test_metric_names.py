"""docs/metrics.md names what runs log: every name that is logged has a row, and every row is a name that is logged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tutelage.reports.metrics_log import read_metrics

DOC = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
NAMES = re.compile(r"^\| (`[^|]+`) \|", re.MULTILINE)


def documented() -> list[str]:
    """The names in the first column of every table; two may share a row."""
    return [name for cell in NAMES.findall(DOC.read_text(encoding="utf-8")) for name in re.findall(r"`([^`]+)`", cell)]


def logged(folder: Path) -> set[str]:
    """The names in metrics.jsonl; a reward source is called NAME, as in the doc."""
    names = {name for row in read_metrics(folder) for name in row} - {"step", "time"}
    return {re.sub(r"^reward/source/.+", "reward/source/NAME", name) for name in names}


@pytest.fixture(scope="module")
def runs(run, files, sft_run, reward_run, ppo_overrides, tmp_path_factory) -> dict[str, set[str]]:
    """What each stage logs, with the settings that add metrics.

    They are: folds, a gold function, the KL in the loss, rollouts cut in their middle, a correction of stale ones.
    """
    gold = tmp_path_factory.mktemp("gold") / "gold.py"
    gold.write_text("def gold(prompt, response):\n    return float(len(response))\n")
    tiny = ["max_steps=1", "ppo.epochs=1", "rollout.max_new_tokens=4", "evaluation.prompts=3"]
    terms = ["kl.placement=loss", "kl.estimator=k2", f"evaluation.gold={gold}:gold"]
    folds = run(
        "reward_model",
        f"model.path={sft_run.best_model}",
        f"data.train={files['preferences']}",
        "reward_model.folds=2",
        "max_steps=1",
    )
    dpo = run("dpo", f"model.path={sft_run.best_model}", f"data.train={files['preferences']}", "max_steps=1")
    groups = [
        f"model.path={sft_run.best_model}",
        f"data.train={files['prompts']}",
        "reward.rules=[{function: 'length_range(low=2)'}]",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=4",
        "evaluation.prompts=3",
        "max_steps=2",
    ]
    stale = ["schedule.kind=asynchronous", "schedule.partial_tokens=12", "off_policy.correction=token_truncated"]
    return {
        "sft": logged(sft_run.folder),
        "reward model": logged(reward_run.folder),
        "folds": logged(folds.folder),
        "dpo": logged(dpo.folder),
        "grpo": logged(run("grpo", *groups, *stale).folder),
        "ppo": logged(run("ppo", *ppo_overrides, *tiny, *terms).folder),
    }


def test_every_name_that_a_run_logs_is_documented_once(runs):
    rows = documented()
    assert len(rows) == len(set(rows))
    assert {stage: names - set(rows) for stage, names in runs.items()} == {stage: set() for stage in runs}


def test_every_documented_name_is_logged_by_some_run(runs):
    assert set(documented()) - set().union(*runs.values()) == set()
