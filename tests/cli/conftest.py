"""A runner for commands, and stand-ins for what trains: these tests are about the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pytest
from typer.testing import CliRunner

RECIPE = """\
# A recipe of the tests.
algorithm: sft
name: mine
model: {path: m}
data: {train: t}
"""


@dataclass
class Result:
    folder: Path
    summary: dict[str, Any] = field(default_factory=lambda: {"steps": 2, "loss": float("nan")})


class Build(ModuleType):
    """Records how it was called; `then` runs inside a training call."""

    def __init__(self) -> None:
        super().__init__("tutelage.build")
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self.then: Callable[[Path], None] = lambda folder: None
        self.answers: list[tuple[list[dict[str, str]], dict[str, Any]]] = []

    def run_recipe(self, loaded: Any, display: str, stream: TextIO | None = None) -> Result:
        self.calls.append(("run", loaded, {"display": display}))
        folder = Path(loaded.config.output_dir) / loaded.config.name
        make_run(folder, steps=())
        self.then(folder)
        return Result(folder)

    def resume_run(self, folder: Path, display: str, overrides: list[str], stream: TextIO | None = None) -> Result:
        self.calls.append(("resume", folder, {"display": display, "overrides": overrides}))
        self.then(folder)
        return Result(folder)

    def check_recipe(self, loaded: Any) -> list[str]:
        self.calls.append(("check", loaded, {}))
        return ["rows: 10", "prompts: 5"]

    def chat_engine(self, model_path: str) -> Any:
        self.calls.append(("chat", model_path, {}))
        build = self

        class Engine:
            def complete(self, messages: list[dict[str, str]], **sampling: Any) -> str:
                build.answers.append(([dict(m) for m in messages], sampling))
                return f"answer {len(build.answers)}"

        return Engine()


def make_run(folder: Path, steps: tuple[int, ...] = (10,), best: bool = False) -> Path:
    """A run folder with checkpoints whose model files hold their own name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("algorithm: sft\n")
    for name in [f"step_{step:06d}" for step in steps] + (["best"] if best else []):
        model = folder / "checkpoints" / name / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_text(name)
    return folder


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    stand_in = Build()
    monkeypatch.setitem(sys.modules, "tutelage.build", stand_in)
    return stand_in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with mine.yaml in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def tutelage() -> Callable[..., Any]:
    """`tutelage("run", "mine.yaml")`: the result of a command, with stdout and stderr apart."""
    from tutelage.cli.app import app

    def invoke(*args: str, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, list(args), input=stdin, catch_exceptions=True)

    return invoke


@pytest.fixture
def new_run() -> Callable[..., Path]:
    return make_run
