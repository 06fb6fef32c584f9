"""Whole runs of online DPO, iterative DPO, XPO and Nash-MD from a recipe, on tiny models with a rule as the judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tutelage.build import RunResult, resume_run, run_recipe
from tutelage.config import load_checked
from tutelage.errors import ConfigError
from tutelage.reports.metrics_log import read_metrics

VOLATILE = ("time", "memory/")
Start = Callable[..., RunResult]


@pytest.fixture(scope="module")
def start(tmp_path_factory: Any, tiny_llama_folder: Path) -> Start:
    """start(algorithm, overrides...): three steps on six prompts, judged by the number of characters."""
    home = tmp_path_factory.mktemp("online")
    prompts = [{"prompt": f"tell me of {topic}"} for topic in ("tea", "cats", "rain", "bread", "maps", "snow", "bikes")]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (home / "judge.py").write_text(
        "def vowels(prompts, responses, truths):\n"
        "    return [sum(r.count(v) for v in 'aeiou ') / (1 + len(r)) for r in responses]\n"
    )

    def run(algorithm: str, *overrides: str) -> RunResult:
        folder = tmp_path_factory.mktemp("runs")
        recipe = folder / "recipe.yaml"
        recipe.write_text(f"algorithm: {algorithm}\nname: {algorithm}\n")
        given = [
            f"model.path={tiny_llama_folder}",
            f"data.train={home / 'prompts.jsonl'}",
            "data.eval_fraction=0.3",
            f"reward.rules=[{{function: '{home / 'judge.py'}:vowels'}}]",
            f"output_dir={folder}",
            "rollout.prompts_per_step=4",
            "rollout.max_new_tokens=6",
            "optim.lr=3e-3",
            "evaluation.prompts=2",
            "epochs=9",
            "max_steps=3",
            *overrides,
        ]
        last = {text.split("=", 1)[0]: text for text in given}
        loaded, _ = load_checked(str(recipe), list(last.values()))
        return run_recipe(loaded, "plain")

    return run


def steps_of(folder: Path) -> list[dict[str, float]]:
    """Metrics of each step without what depends on the clock or the machine."""
    rows = read_metrics(folder)
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows]


def quality_of(result: RunResult) -> str:
    """What the best model was chosen by."""
    return (result.folder / "checkpoints" / "best" / "quality.json").read_text()


CASES = {
    "online_dpo": ["online_dpo.minibatches=2", "rollout.samples_per_prompt=3"],
    "online_ipo": ["online_dpo.loss=ipo_sum", "schedule.kind=one_step_off"],
    "xpo": ["xpo.epochs=2"],
    "xpo lora": ["model.lora_rank=4", "rollout.temperature=0.7"],
    "nash_md": ["nash_md.minibatches=2"],
    "nash_md lora": ["model.lora_rank=4", "rollout.temperature=0.7", "nash_md.mixture_coef=0.25"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_trains_evaluates_and_says_what_the_judgements_were(case: str, start: Start) -> None:
    algorithm = {"online_ipo": "online_dpo"}.get(case, case.split()[0])
    result = start(algorithm, *CASES[case])
    rows = [row for row in steps_of(result.folder) if "preference/tied_fraction" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["kl/sequence"] == pytest.approx(0.0, abs=1e-4), "the policy starts as its reference"
    assert result.summary["after"]["eval/kl_sequence"] != 0.0
    assert "eval/proxy_mean - 0.1 * eval/kl_sequence" in quality_of(result)
    assert (result.best_model / "config.json").is_file()
    if algorithm == "nash_md":
        assert 0.3 < rows[0]["preference/probability"] < 0.7
        assert rows[0]["policy/grad_norm"] > 0
    else:
        assert rows[0]["dpo/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "extra"),
    [
        ("online_dpo", ["online_dpo.reference_every=1"]),
        ("online_dpo", ["online_dpo.reference_every=2", "schedule.kind=one_step_off"]),
        ("xpo", ["schedule.kind=one_step_off"]),
        ("nash_md", []),
    ],
    ids=["iterative", "iterative one step off", "xpo one step off", "nash_md"],
)
def test_a_resumed_run_repeats_the_rest_to_the_bit(algorithm: str, extra: list[str], start: Start) -> None:
    result = start(algorithm, "checkpoint.every=2", "checkpoint.keep=9", "max_steps=4", *extra)
    last, roles = result.folder / "checkpoints" / "step_000004", ["actor"]
    if "iterative" in algorithm or any("reference_every" in text for text in extra):
        roles.append("reference")
    before = {role: load_file(last / role / "rank_00000.safetensors") for role in roles}
    metrics = steps_of(result.folder)
    shutil.rmtree(last)
    shutil.rmtree(result.folder / "checkpoints" / "best")
    (result.folder / "summary.json").unlink()
    again = resume_run(result.folder, "plain")
    assert again.summary["after"] == result.summary["after"]
    assert steps_of(result.folder) == metrics
    for role, wanted in before.items():
        found = load_file(last / role / "rank_00000.safetensors")
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_iterative_dpo_measures_each_round_from_its_own_reference(start: Start) -> None:
    result = start("online_dpo", "online_dpo.reference_every=2", "max_steps=4")
    kl = [row["kl/sequence"] for row in steps_of(result.folder) if "kl/sequence" in row]
    assert kl[0] == pytest.approx(0.0, abs=1e-4)
    assert kl[1] != pytest.approx(0.0, abs=1e-6)
    assert kl[2] == pytest.approx(0.0, abs=1e-4)
    assert "eval/kl_sequence" in result.summary["after"]
    assert "kl_sequence" not in quality_of(result), "quality does not pay for a KL whose reference moves"


def test_what_cannot_work_is_refused_before_a_model_is_loaded(start: Start) -> None:
    with pytest.raises(ConfigError, match="with LoRA the reference is the base"):
        start("online_dpo", "online_dpo.reference_every=2", "model.lora_rank=4")
    with pytest.raises(ConfigError, match=r"a step has 4 pairs[\s\S]*fewer than online_dpo.minibatches 6"):
        start("online_dpo", "online_dpo.minibatches=6")
    with pytest.raises(ConfigError, match=r"there are 5 prompts, so a step has 5 pairs, fewer than"):
        start("online_dpo", "online_dpo.minibatches=6", "rollout.prompts_per_step=8")
