"""The algorithm of docs/your_own.md, taken from the page, as a user would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tutelage.build import resume_run, run_recipe
from tutelage.build.check import check_recipe
from tutelage.config import load_checked
from tutelage.errors import ConfigError
from tutelage.reports.metrics_log import read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "your_own.md"


@pytest.fixture
def toy(tmp_path) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "toy.py"
    path.write_text(code)
    return path


@pytest.fixture
def recipe(tmp_path, tiny_llama_folder, files, toy) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: grpo\nname: toy\nimplementation: toy.py\n")
    given = (
        f"output_dir={tmp_path}",
        f"model.path={tiny_llama_folder}",
        f"data.train={files['prompts']}",
        "reward.rules=[{function: 'length_range(low=1, high=3)'}]",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=6",
        "evaluation.prompts=2",
        "kl.coef=0",
        "max_steps=4",
        "checkpoint.every=2",
    )
    return [str(path), *given]


def test_it_is_short(toy):
    lines = [line for line in toy.read_text().splitlines() if line.strip()]
    assert len(lines) < 40


def test_it_trains_from_a_recipe_beside_it_and_its_state_is_resumed(recipe, tmp_path):
    loaded, _ = load_checked(recipe[0], recipe[1:])
    assert any("toy.py, in place of grpo" in line for line in check_recipe(loaded))
    run = run_recipe(loaded, "plain")
    rows = [row for row in read_metrics(run.folder) if "toy/mean" in row]
    mean = 0.0
    for row in rows:
        mean = 0.9 * mean + 0.1 * row["toy/score"]
        assert row["toy/mean"] == pytest.approx(mean, abs=1e-6)
    assert len(rows) == 4
    assert not any("group_std" in name for row in rows for name in row)  # GRPO's own statistics: it did not run

    (run.folder / "summary.json").unlink()
    for later in ("step_000004",):
        for path in sorted((run.folder / "checkpoints" / later).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (run.folder / "checkpoints" / later).rmdir()
    again = resume_run(run.folder, "plain")
    after = [row for row in read_metrics(again.folder) if "toy/mean" in row]
    assert [row["toy/mean"] for row in after] == [row["toy/mean"] for row in rows]


def test_what_is_no_algorithm_is_refused_before_anything_loads(recipe, toy):
    toy.write_text("def learn(): ...\n")
    loaded, _ = load_checked(recipe[0], recipe[1:])
    with pytest.raises(ConfigError, match=r"has no ROLES, PREFIXES, PUBLISHED, initial_state"):
        check_recipe(loaded)


def test_a_file_that_is_not_there_is_named(recipe):
    loaded, _ = load_checked(recipe[0], [*recipe[1:], "implementation=toi.py"])
    with pytest.raises(ConfigError, match=r"there is no file .*toi\.py"):
        check_recipe(loaded)
