"""Functions of the user's own that print, and steps in which none of them gives a score, through the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tutelage.cli.app import app
from tutelage.reports.metrics_log import read_events, read_metrics

OWN = """\
print("module", "loaded")


class World:
    def __init__(self):
        print("environment made")

    def reset(self, messages, truth, seed):
        print("environment reset")

    def step(self, tokens, text):
        from tutelage.protocols import Turn
        print("environment step")
        return Turn("", float(len(tokens)), done=True)


def rule(response):
    print("rule called")
    return float(len(response))


def gold(prompt, response):
    print("gold called")
    return float(len(response))


def raises(response):
    raise ValueError("no score")
"""
PRINTED = ("module loaded", "environment made", "environment reset", "environment step", "gold called")
Command = Callable[..., Any]


@pytest.fixture
def command(tmp_path: Path, tiny_llama_folder: Path, files: dict[str, Path]) -> Command:
    """command(name, algorithm, overrides...): the result of a command on a recipe with own.py beside it."""
    (tmp_path / "own.py").write_text(OWN)

    def invoke(name: str, algorithm: str, *overrides: str) -> Any:
        (tmp_path / "recipe.yaml").write_text(f"algorithm: {algorithm}\nname: r\n")
        given = (
            f"output_dir={tmp_path / 'runs'}", f"model.path={tiny_llama_folder}", f"data.train={files['prompts']}",
            "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4",
            "evaluation.prompts=2", "max_steps=2", *(() if algorithm == "online_dpo" else ("kl.coef=0",)),
        )  # fmt: skip
        return CliRunner().invoke(app, [name, str(tmp_path / "recipe.yaml"), *given, *overrides])

    return invoke


@pytest.mark.parametrize("name", ["check", "run"])
def test_json_stays_alone_on_stdout_whatever_functions_print(command: Command, name: str) -> None:
    given = ("environment.functions={own: 'own.py:World'}", "reward.rules=[{function: 'own.py:rule'}]")
    result = command(name, "grpo", *given, "evaluation.gold=own.py:gold", "--json")
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(isinstance(value, dict) for value in found)
    if name == "check":
        assert [value["ok"] for value in found] == [True]
    else:
        assert {value["step"] for value in found if value.get("type") == "step"} == {0, 1, 2}
        assert "summary" in found[-1]
    called = PRINTED if name == "run" else PRINTED[:2]
    assert [text for text in called if text not in result.stderr] == []


KINDS = ("unscored", "nothing_kept")
SKIP = ("reward.rules=[{function: 'own.py:raises'}]", "reward.on_error=skip")


def alarms(folder: Path) -> dict[int, str]:
    """Step -> message of what was told of."""
    return {e["step"]: f"{e['kind']}: {e['message']}" for e in read_events(folder) if e["kind"] in KINDS}


@pytest.mark.parametrize("algorithm", ["raft", "grpo", "online_dpo"])
def test_a_step_in_which_nothing_has_a_score_is_told_of_once(command: Command, tmp_path: Path, algorithm: str) -> None:
    result = command("run", algorithm, *SKIP)
    assert result.exit_code == 0, result.output
    told = alarms(tmp_path / "runs" / "r")
    assert list(told) == [1]
    what = "none of the 2 pairs of this step has two scores" if algorithm == "online_dpo" else "none of the 4 responses"
    assert told[1].startswith(f"unscored: {what}")


def test_rejection_sampling_that_keeps_nothing_is_told_of(command: Command, tmp_path: Path) -> None:
    keep = ("raft.keep=threshold", "raft.threshold=1e9", "reward.rules=[{function: 'own.py:rule'}]")
    result = command("run", "raft", *keep)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "r"
    assert [m["raft/kept_fraction"] for m in read_metrics(folder) if "raft/kept_fraction" in m] == [0.0, 0.0]
    told = alarms(folder)
    assert list(told) == [1]
    assert "nothing_kept: no response of this step reaches raft.threshold 1e+09" in told[1]
