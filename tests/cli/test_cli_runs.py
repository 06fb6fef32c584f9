"""demo, run, resume, check and report: what they call, print and return."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tutelage.config import SCHEMAS
from tutelage.config.describe import walk
from tutelage.errors import TrainingError

Cli = Callable[..., Any]
LEFT = "  The run is in runs/mine, without a checkpoint yet (checkpoint.every=N writes them while training).\n"


def test_run_trains_the_recipe_with_its_overrides(tutelage: Cli, build: Any, folder: Path) -> None:
    result = tutelage("run", "mine.yaml", "seed=4", "optim.lr=1e-3")
    assert result.exit_code == 0
    ((name, loaded, options),) = build.calls
    assert (name, loaded.config.seed, loaded.config.optim.lr) == ("run", 4, 0.001)
    assert options == {"display": "plain"}
    assert result.stdout == "run folder: runs/mine\n"


def test_run_names_the_report_where_there_is_one(tutelage: Cli, build: Any, folder: Path) -> None:
    build.then = lambda run: (run / "report.html").write_text("")
    assert "report: runs/mine/report.html" in tutelage("run", "mine.yaml").stdout


def test_json_is_one_object_on_stdout_without_nan(tutelage: Cli, build: Any, folder: Path) -> None:
    result = tutelage("run", "mine.yaml", "data.eval_fraction=0", "--json")
    assert json.loads(result.stdout) == {
        "folder": "runs/mine",
        "report": None,
        "summary": {"steps": 2, "loss": None},
    }
    assert "warning: data.eval_fraction is 0" in result.stderr
    assert build.calls[0][2] == {"display": "json"}


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_config_that_cannot_be_used_stops_before_anything_loads(
    tutelage: Cli, build: Any, folder: Path, command: str
) -> None:
    result = tutelage(command, "mine.yaml", "optim.lr=-1")
    assert result.exit_code == 2
    assert result.stderr == "ConfigError: optim.lr must be greater than 0 (override optim.lr=-1, value -1).\n"
    assert result.stdout == ""
    assert build.calls == []
    assert tutelage(command, "mine.yaml", "model.lora_alpha=1").exit_code == 2


def test_an_error_of_ours_is_one_message_and_exit_1(tutelage: Cli, build: Any, folder: Path) -> None:
    def fail(run: Path) -> None:
        error = TrainingError("the loss is nan", fix="lower optim.lr")
        error.add_note("at step 3 of 9")
        raise error

    build.then = fail
    result = tutelage("run", "mine.yaml")
    assert result.exit_code == 1
    assert result.stderr == "TrainingError: the loss is nan\n  fix: lower optim.lr\n  at step 3 of 9\n" + LEFT


@pytest.mark.parametrize("place", [0, 3])
def test_debug_anywhere_keeps_the_exception(tutelage: Cli, build: Any, folder: Path, place: int) -> None:
    args = ["run", "mine.yaml", "nokey=1"]
    args.insert(place, "--debug")
    result = tutelage(*args)
    assert type(result.exception).__name__ == "ConfigError"


def test_a_bug_keeps_its_traceback(tutelage: Cli, build: Any, folder: Path) -> None:
    def fail(run: Path) -> None:
        raise ZeroDivisionError("a bug")

    build.then = fail
    assert isinstance(tutelage("run", "mine.yaml").exception, ZeroDivisionError)


def test_ctrl_c_says_where_the_run_is_and_how_to_resume(
    tutelage: Cli, build: Any, folder: Path, new_run: Callable[..., Path]
) -> None:
    new_run(folder / "runs" / "older", steps=(1,))

    def stop(run: Path) -> None:
        (run / "checkpoints" / "step_000020").mkdir(parents=True, exist_ok=True)
        raise KeyboardInterrupt

    build.then = stop
    result = tutelage("run", "mine.yaml")
    assert result.exit_code == 130
    assert "The run is in runs/mine, its last checkpoint is step_000020." in result.stderr
    assert "tutelage resume runs/mine\n" in result.stderr
    assert "older" not in result.stderr
    again = tutelage("resume", "runs/mine")
    assert again.exit_code == 130
    assert "tutelage resume runs/mine\n" in again.stderr


def test_ctrl_c_without_a_checkpoint_promises_nothing(tutelage: Cli, build: Any, folder: Path) -> None:
    def stop(run: Path) -> None:
        raise KeyboardInterrupt

    build.then = stop
    result = tutelage("run", "mine.yaml")
    assert "without a checkpoint yet" in result.stderr
    assert "tutelage resume" not in result.stderr


def test_resume_goes_on_with_a_run_folder(
    tutelage: Cli, build: Any, folder: Path, new_run: Callable[..., Path]
) -> None:
    new_run(folder / "runs" / "first")
    result = tutelage("resume", "runs/first", "--json")
    assert json.loads(result.stdout)["folder"] == "runs/first"
    assert build.calls == [("resume", Path("runs/first"), {"display": "json", "overrides": []})]
    assert tutelage("resume", "runs/first", "cluster.address=auto", "cluster.restarts=1").exit_code == 0
    assert build.calls[1][2]["overrides"] == ["cluster.address=auto", "cluster.restarts=1"]


@pytest.mark.parametrize("command", [["resume"], ["report"], ["export"]])
def test_a_folder_that_is_no_run_names_the_closest_one(
    tutelage: Cli, build: Any, folder: Path, new_run: Callable[..., Path], command: list[str]
) -> None:
    new_run(folder / "runs" / "first")
    result = tutelage(*command, "runs/fisrt", *(["out"] if command == ["export"] else []))
    assert result.exit_code == 1
    assert result.stderr.startswith("CheckpointError: runs/fisrt does not exist. Did you mean first?\n")


def test_check_prints_what_was_checked(tutelage: Cli, build: Any, folder: Path) -> None:
    result = tutelage("check", "mine.yaml")
    assert (result.exit_code, result.stdout) == (0, "rows: 10\nprompts: 5\n")
    as_json = json.loads(tutelage("check", "mine.yaml", "data.eval_fraction=0", "--json").stdout)
    assert (as_json["ok"], as_json["lines"], len(as_json["warnings"])) == (True, ["rows: 10", "prompts: 5"], 1)


def test_run_help_prints_every_key_of_every_algorithm(tutelage: Cli) -> None:
    result = tutelage("run", "--help")
    assert result.exit_code == 0
    assert "Usage: tutelage run" in result.stdout or "Usage: root run" in result.stdout
    for name, schema in SCHEMAS.items():
        part = result.stdout.split(f"Settings with algorithm={name}:")[1].split("Settings with")[0]
        for key in walk(schema):
            assert f"  {key.name}  (" in part
            assert key.meaning in part


def test_run_help_of_a_recipe_shows_its_values(tutelage: Cli, folder: Path) -> None:
    text = tutelage("run", "mine.yaml", "seed=3", "--help").stdout
    assert '* name = "mine"  (mine.yaml:3; default "run"; ' in text
    assert "* seed = 3  (override seed=3; default 0; " in text
    assert "ppo.gamma" not in text


def test_run_without_a_recipe_is_wrong_usage(tutelage: Cli, build: Any) -> None:
    result = tutelage("run")
    assert result.exit_code == 2
    assert "tutelage recipes" in result.stderr


def test_report_is_written_again(
    tutelage: Cli, folder: Path, new_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_run(folder / "runs" / "first")
    page = ModuleType("tutelage.reports.html")
    page.write_report = lambda run: run / "report.html"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tutelage.reports.html", page)
    assert tutelage("report", "runs/first").stdout == "report: runs/first/report.html\n"
    assert json.loads(tutelage("report", "runs/first", "--json").stdout) == {"report": "runs/first/report.html"}


def test_demo_passes_folder_seed_and_display(tutelage: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    module = ModuleType("tutelage.cli.demo")
    module.run_demo = lambda folder, seed, display, stream: calls.append((folder, seed, display))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tutelage.cli.demo", module)
    assert tutelage("demo").exit_code == 0
    assert tutelage("demo", "--dir", "there", "--seed", "3", "--json").exit_code == 0
    assert calls == [(Path("runs/demo"), 0, "plain"), (Path("there"), 3, "json")]


def test_the_commands_fit_the_functions_they_call() -> None:
    build = importlib.import_module("tutelage.build")
    inspect.signature(build.run_recipe).bind(object(), display="plain", stream=None)
    inspect.signature(build.resume_run).bind(Path(), display="plain", overrides=[], stream=None)
    inspect.signature(build.check_recipe).bind(object())
    inspect.signature(build.chat_engine).bind("model")
    assert {"folder", "summary"} <= set(build.RunResult.__annotations__)
    inspect.signature(importlib.import_module("tutelage.cli.demo").run_demo).bind(Path(), 0, "plain")
    inspect.signature(importlib.import_module("tutelage.reports.html").write_report).bind(Path())
