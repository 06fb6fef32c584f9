"""chat and export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tutelage.cli import models

Cli = Callable[..., Any]


def test_one_answer_with_its_sampling(tutelage: Cli, build: Any, folder: Path) -> None:
    flags = ["--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1", "--max-new-tokens", "9"]
    result = tutelage("chat", "m", "--prompt", "hello", "--system", "be kind", "--seed", "2", *flags)
    assert (result.exit_code, result.stdout) == (0, "answer 1\n")
    assert build.calls == [("chat", "m", {})]
    ((messages, sampling),) = build.answers
    assert messages == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert sampling == {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "max_new_tokens": 9,
        "seed": 2,
    }


def test_temperature_zero_is_greedy(tutelage: Cli, build: Any, folder: Path) -> None:
    tutelage("chat", "m", "--prompt", "hello", "--temperature", "0")
    assert build.answers[0][1] == {"greedy": True, "max_new_tokens": 256, "seed": 0}


def test_a_conversation_remembers_until_it_is_reset(tutelage: Cli, build: Any, folder: Path) -> None:
    result = tutelage("chat", "m", stdin="one\ntwo\n/reset\nthree\n\nignored\n")
    assert result.exit_code == 0
    assert result.stdout == "answer 1\nanswer 2\nanswer 3\n"
    contents = [[m["content"] for m in messages] for messages, _ in build.answers]
    assert contents == [["one"], ["one", "answer 1", "two"], ["three"]]


def test_a_run_folder_means_its_best_model(
    tutelage: Cli, build: Any, folder: Path, new_run: Callable[..., Path]
) -> None:
    new_run(folder / "runs" / "a", steps=(5,), best=True)
    tutelage("chat", "runs/a", "--prompt", "x")
    assert build.calls[0][1] == "runs/a/checkpoints/best/model"


@pytest.mark.parametrize(
    ("best", "flags", "copied"),
    [(True, [], "best"), (False, [], "step_000020"), (True, ["--which", "final"], "step_000020")],
)
def test_export_copies_the_best_or_the_last_model(
    tutelage: Cli, folder: Path, new_run: Callable[..., Path], best: bool, flags: list[str], copied: str
) -> None:
    new_run(folder / "runs" / "a", steps=(3, 20), best=best)
    result = tutelage("export", "runs/a", "out/model", *flags)
    assert result.exit_code == 0
    assert sorted(p.name for p in Path("out/model").iterdir()) == ["config.json", "model.safetensors"]
    assert Path("out/model/model.safetensors").read_text() == copied
    assert [p.name for p in Path("out").iterdir()] == ["model"]


def test_export_never_writes_over_anything(tutelage: Cli, folder: Path, new_run: Callable[..., Path]) -> None:
    new_run(folder / "runs" / "a")
    Path("out").mkdir()
    Path("out/mine.txt").write_text("kept")
    result = tutelage("export", "runs/a", "out")
    assert result.exit_code == 1
    assert "out exists and is not empty" in result.stderr
    assert [p.name for p in Path("out").iterdir()] == ["mine.txt"]


def test_export_without_a_checkpoint_says_so(tutelage: Cli, folder: Path, new_run: Callable[..., Path]) -> None:
    new_run(folder / "runs" / "a", steps=())
    assert "runs/a holds no finished checkpoint" in tutelage("export", "runs/a", "out").stderr


def test_a_full_disk_leaves_nothing_behind(
    tutelage: Cli, folder: Path, new_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_run(folder / "runs" / "a")

    def full(source: Path, target: Path) -> None:
        target.mkdir()
        raise shutil.Error([("model.safetensors", "out", "No space left on device")])

    monkeypatch.setattr(models.shutil, "copytree", full)
    result = tutelage("export", "runs/a", "out")
    assert result.exit_code == 1
    assert result.stderr.startswith("CheckpointError: out cannot be written")
    assert "No space left" in result.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["mine.yaml", "runs"]
