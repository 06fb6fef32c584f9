"""scripts/equality.py: its measures by hand, and its shortest run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "equality.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("equality", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["equality"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def outcome(script: ModuleType, loss: float, gradient: float, weight: float) -> object:
    key = ("sft", "actor")
    return script.Outcome(
        losses={key: [2.0, loss]},
        gradients={key: {"w": torch.tensor([3.0, 4.0 + gradient])}},
        weights={key: {"w": torch.tensor([1.0, 1.0 + weight])}},
    )


def test_differences_are_relative_and_weights_count_in_steps(script: ModuleType) -> None:
    base, case = outcome(script, 1.0, 0.0, 0.0), script.CASES[1]
    (row,) = script.compare(case, True, outcome(script, 1.0 + 1e-5, 5e-5, 1.5e-3), base, steps=3)
    assert row["loss"] == pytest.approx(1e-5)
    assert row["gradient"] == pytest.approx(1e-5, rel=1e-2)  # 5e-5 of a gradient of norm 5
    assert row["weights"] == pytest.approx(0.5, rel=1e-3)  # of 3 steps of 1e-3
    assert row["equal"]


@pytest.mark.parametrize("off", [(3e-5, 0.0, 0.0), (0.0, 2e-4, 0.0), (0.0, 0.0, 0.013)])
def test_each_measure_alone_makes_a_layout_unequal(script: ModuleType, off: tuple[float, float, float]) -> None:
    loss, gradient, weight = off
    base = outcome(script, 1.0, 0.0, 0.0)
    (row,) = script.compare(script.CASES[1], True, outcome(script, 1.0 + loss, gradient, weight), base, steps=3)
    assert not row["equal"]


def test_samples_are_counted_and_every_layout_of_the_matrix_is_a_case(script: ModuleType) -> None:
    ours, theirs = script.Outcome(samples=[[1], [2, 3], [4]]), script.Outcome(samples=[[1], [2, 4], [4]])
    assert script.same_samples(ours, theirs) == "2/3"
    assert script.same_samples(script.Outcome(), theirs) == "n/a"
    names = [case.name for case in script.CASES]
    assert names[0] == "local"
    assert len(names) == len(set(names)) == 11


@pytest.mark.slow
def test_one_process_equals_itself_and_the_table_is_written_below_the_marker(tmp_path: Path) -> None:
    page = tmp_path / "equality.md"
    page.write_text("# Equality\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--layouts", "local", "--steps", "1", "--write", str(page)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "local: all equal, samples 14/14" in done.stdout
    text = page.read_text()
    assert text.startswith("# Equality\n<!-- written by scripts/equality.py -->\n")
    for row in ("sft.actor", "reward_model.reward", "dpo.actor", "ppo.actor", "ppo.critic"):
        assert text.count(f"| {row} | 0.0e+00 | 0.0e+00 | 0.000 | yes |") == 2
