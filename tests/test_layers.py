"""What loads without torch. Which layer may import which is held by `.importlinter` (`make layers`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "peft", "matplotlib", "numpy", "ray", "vllm")
SHOW = "import sys; print('LOADED', *sorted(set(sys.modules) & {names!r}))"
CLI = """
import sys
sys.argv = ["tutelage", *{args!r}]
from tutelage.cli import main
try:
    main()
except SystemExit as stop:
    assert stop.code == {code}, stop.code
"""


def loaded_by(code: str) -> list[str]:
    """The heavy modules that a fresh process holds after running some code."""
    show = SHOW.replace("{names!r}", repr(set(HEAVY)))
    done = subprocess.run([sys.executable, "-c", f"{code}\n{show}"], capture_output=True, text=True, check=True)
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("LOADED"))
    return line.split()[1:]


def test_the_probe_sees_a_heavy_module() -> None:
    assert loaded_by("import numpy") == ["numpy"]


def test_config_loads_without_torch() -> None:
    assert loaded_by("import tutelage.config; tutelage.config.load_recipe('hh_ppo')") == []


@pytest.mark.parametrize(
    ("args", "code"),
    [(["--help"], 0), (["run", "--help"], 0), (["recipes", "show", "hh_ppo"], 0), (["run", "hh_ppo", "no.key=1"], 2)],
    ids=["help", "run-help", "recipes-show", "wrong-config"],
)
def test_the_command_answers_without_torch(args: list[str], code: int) -> None:
    assert loaded_by(CLI.replace("{args!r}", repr(args)).replace("{code}", str(code))) == []
