"""recipes and doctor."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from tutelage.cli import doctor
from tutelage.config import shipped_recipes

Cli = Callable[..., Any]


def test_recipes_lists_what_is_shipped(tutelage: Cli) -> None:
    result = tutelage("recipes")
    assert result.exit_code == 0
    assert [
        line.split()[0] for line in result.stdout.splitlines() if not line.startswith(("`", "\n")) and line
    ] == list(shipped_recipes())


def test_show_prints_values_beside_defaults(tutelage: Cli, folder: Path) -> None:
    text = tutelage("recipes", "show", "mine.yaml", "optim.lr=1e-3").stdout
    assert "* optim.lr = 0.001  (override optim.lr=1e-3; default 1e-05; number > 0)  Peak learning rate." in text
    assert '  optim.schedule = "linear"  (default; ' in text


def test_show_as_json_is_the_config_and_what_was_set(tutelage: Cli, folder: Path) -> None:
    shown = json.loads(tutelage("recipes", "show", "mine.yaml", "seed=2", "--json").stdout)
    assert (shown["config"]["seed"], shown["config"]["optim"]["eps"]) == (2, 1e-5)
    assert shown["set"]["name"] == "mine.yaml:3"
    assert shown["set"]["seed"] == "override seed=2"


def test_show_of_an_unknown_recipe(tutelage: Cli) -> None:
    result = tutelage("recipes", "show", "hh_pp")
    assert result.exit_code == 2
    assert "Did you mean hh_ppo?" in result.stderr


def test_packages_are_held_against_the_requirements() -> None:
    installed = {"torch": "2.5.0", "rich": "13.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    requirements = [
        "torch>=2.6",
        "rich>=13",
        "peft>=0.18",
        'wandb; extra == "wandb"',
        'ruff; extra == "dev"',
        'x; python_version < "3"',
    ]
    found = {f.name: f for f in doctor.packages(requirements, ["wandb"], version)}
    assert {name: f.state for name, f in found.items()} == {
        "torch": "problem",
        "rich": "ok",
        "peft": "problem",
        "wandb (optional)": "absent",
    }
    assert found["torch"].detail == "2.5.0, but >=2.6 is needed"
    assert found["wandb (optional)"].fix == "pip install 'tutelage[wandb]'"
    assert found["peft"].fix == "pip install 'peft>=0.18'"


def test_more_threads_than_processors_is_a_problem() -> None:
    assert doctor.threads(2, 2).state == "ok"
    assert doctor.threads(8, 2) == doctor.Finding(
        "threads", "problem", "torch uses 8 threads on 2 processors", "set OMP_NUM_THREADS=2"
    )


def test_disk_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert doctor.disk(tmp_path / "not" / "yet", needed=1).state == "ok"
    assert str(tmp_path) in doctor.disk(tmp_path / "not" / "yet", needed=1).detail
    assert doctor.disk(tmp_path, needed=10**18).state == "problem"


def test_doctor_exits_1_with_a_problem_and_0_without(
    tutelage: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [doctor.Finding("a", "ok", "fine"), doctor.Finding("b", "absent", "none", "get it")]
    monkeypatch.setattr(doctor, "examine", lambda where: iter(findings))
    result = tutelage("doctor")
    assert result.exit_code == 0
    assert result.stdout.endswith("fix: get it\n0 problems found\n")
    findings.append(doctor.Finding("c", "problem", "broken", "mend it"))
    result = tutelage("doctor")
    assert result.exit_code == 1
    assert "PROBLEM c: broken\n          fix: mend it\n1 problem found\n" in result.stdout
    shown = json.loads(tutelage("doctor", "--json").stdout)
    assert (shown["ok"], [f["state"] for f in shown["findings"]]) == (False, ["ok", "absent", "problem"])


def test_examine_reports_this_installation(tmp_path: Path) -> None:
    found = {f.name: f for f in doctor.examine(tmp_path)}
    assert {"python", "torch", "transformers", "pyyaml", "torch build", "device", "threads", "disk"} <= set(found)
    assert found["torch"].state == "ok"
