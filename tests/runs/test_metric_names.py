"""docs/metrics.md names what runs log: every name that is logged has a row, and every row is a name that is logged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tutelage.build import RunResult
from tutelage.reports.metrics_log import read_metrics

DOC = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
NAMES = re.compile(r"^\| (`[^|]+`) \|", re.MULTILINE)
OF_A_RECIPE = {
    r"reward/source/.+": "reward/source/NAME",
    r"environment/[^/]+/(reward|turns|truncated_fraction|episodes|failed)": r"environment/NAME/\1",
    r"environment/(?!NAME/)[^/]+/.+": "environment/NAME/KEY",
    r"eval/rule/.+": "eval/rule/NAME",
    r"eval/pass_at_\d+/.+": "eval/pass_at_K/NAME",
    r"time/(?!tokens_per_s/|bubble/)[^/]+/.+": "time/ROLE/CALL",
}
"""Names that hold one from the recipe -> how the doc writes them."""
Run = Callable[..., RunResult]


def documented() -> list[str]:
    """The names in the first column of every table; several may share a row."""
    return [name for cell in NAMES.findall(DOC.read_text(encoding="utf-8")) for name in re.findall(r"`([^`]+)`", cell)]


def logged(result: RunResult) -> set[str]:
    """The names in metrics.jsonl, as in the doc."""
    return {as_documented(name) for row in read_metrics(result.folder) for name in row} - {"step", "time"}


def as_documented(name: str) -> str:
    for pattern, written in OF_A_RECIPE.items():
        name = re.sub(f"^{pattern}$", written, name)
    return name


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A folder with labelled steps, a gold function, and rules of which one fails on many prompts."""
    folder = tmp_path_factory.mktemp("own")
    steps = [{"prompt": f"what is {n}", "completions": ["a number.", "no no."], "labels": [1, 0]} for n in range(20)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    (folder / "gold.py").write_text("def gold(prompt, response):\n    return float(len(response))\n")
    (folder / "rules.py").write_text(
        "def vowels(prompts, responses, truths):\n"
        "    return [sum(r.count(v) for v in 'aeiou ') / (1 + len(r)) for r in responses]\n\n\n"
        "def picky(prompt, response):\n"
        "    if 'wh' in str(prompt):\n"
        "        raise ValueError('no')\n"
        "    return float(len(response))\n"
    )
    return folder


@pytest.fixture(scope="module")
def on_data(run, files, own, sft_run, reward_run) -> dict[str, set[str]]:
    """What the stages without rollouts log: a reference that moves, all answers' mean reward, single answers, steps."""
    start = [f"model.path={sft_run.best_model}", f"data.train={files['preferences']}", "max_steps=1"]
    moving = ["dpo.divergence=forward_kl", "dpo.sync_every=1"]
    coupled = ["dpo.loss=bco_pair", "dpo.nll_coef=0.1", "dpo.weighting=wpo", "evaluation.distance_prompts=0"]
    steps = [f"data.train={own / 'steps.jsonl'}", "reward_model.loss=step_bce"]
    found = {
        "sft": sft_run,
        "reward model": reward_run,
        "folds": run("reward_model", *start, "reward_model.folds=2"),
        "steps": run("reward_model", *start, *steps),
        "dpo": run("dpo", *start, *moving),
        "bco_pair": run("dpo", *start, *coupled),
        "kto": run("kto", *start),
        "bco": run("kto", *start, "kto.loss=bco"),
    }
    return {stage: logged(result) for stage, result in found.items()}


@pytest.fixture(scope="module")
def on_rollouts(run, own, sft_run, reward_run, ppo_overrides, files) -> dict[str, set[str]]:
    """What the stages with rollouts log, with the settings that add metrics.

    ppo: a gold function, held-out rules with pass@k, the KL in the loss, a loss by covariance, adaptive entropy.
    grpo: stale rollouts, cut in their middle and corrected.  dapo: groups that are refilled, an environment.
    online_dpo: a rule that fails, a reference that follows.
    """
    judge = f"reward.rules=[{{function: '{own / 'rules.py'}:vowels'}}]"
    tiny = ["rollout.prompts_per_step=4", "rollout.max_new_tokens=4", "evaluation.prompts=3", "max_steps=1"]
    start = [f"model.path={sft_run.best_model}", f"data.train={files['prompts']}", judge, *tiny]
    terms = ["kl.placement=loss", "kl.estimator=k2", f"evaluation.gold={own / 'gold.py'}:gold"]
    terms += ["policy_loss.kind=clip_cov", "policy_loss.entropy_controller=adaptive", "ppo.epochs=1"]
    terms += ["evaluation.rules=[{name: short, function: 'length_range(high=2)'}]"]
    terms += ["model.gradient_checkpointing=true", "model.activation_bytes=1000000000"]
    terms += ["evaluation.samples=2", "evaluation.pass_at=[2]"]
    two = "rollout.samples_per_prompt=2"
    stale = ["schedule.kind=asynchronous", "schedule.partial_tokens=12", "max_steps=2"]
    stale += ["off_policy.correction=token_truncated", two]
    dapo = ["kl.coef=0", two, "grpo.dynamic_sampling=true", "grpo.max_refills=1", "grpo.overlong_buffer=2"]
    streamed = [*dapo, "schedule.stream=true"]
    dapo += ["environment.functions={game: 'number_guessing(low=0, high=9)'}", "environment.max_turns=2"]
    failing = [f"reward.rules=[{{function: '{own / 'rules.py'}:picky'}}]", "reward.on_error=skip", two]
    ensemble = f"reward.ensemble=['{reward_run.best_model}', '{reward_run.best_model}']"
    teacher = f"teacher.path={sft_run.best_model}"
    found = {
        "ppo": run("ppo", *ppo_overrides, *tiny, *terms),
        "grpo": run("grpo", *start, *stale),
        "dapo": run("grpo", *start, *dapo),
        "streamed": run("grpo", *start, *streamed),
        "online_dpo": run("online_dpo", *start, *failing, "online_dpo.reference_every=1"),
        "xpo": run("xpo", *start),
        "nash_md": run("nash_md", *start),
        "distill": run("distill", *start, teacher),
        "distill sampled": run("distill", *start, teacher, "distill.form=sampled"),
        "raft": run("raft", *start, two, "kl.coef=0.1", "reward.rules=[]", ensemble),
    }
    return {stage: logged(result) for stage, result in found.items()}


@pytest.fixture(scope="module")
def runs(on_data, on_rollouts) -> dict[str, set[str]]:
    return {**on_data, **on_rollouts}


def test_every_name_that_a_run_logs_is_documented_once(runs):
    rows = documented()
    assert len(rows) == len(set(rows))
    assert {stage: names - set(rows) for stage, names in runs.items()} == {stage: set() for stage in runs}


def test_every_documented_name_is_logged_by_some_run(runs):
    assert set(documented()) - set().union(*runs.values()) == set()
