"""A copy of a run in an object store: what goes up, in which order, and a run folder made from it again."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from tutelage.errors import CheckpointError
from tutelage.mirror import Mirror, fetch


@pytest.fixture
def store():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def checkpoint(folder: Path, step: int) -> None:
    place = folder / "checkpoints" / f"step_{step:06d}"
    (place / "actor").mkdir(parents=True)
    (place / "actor" / "index.json").write_text(f"weights of {step}")
    (place / "state.json").write_text("{}")


def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "ppo"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("algorithm: ppo\n")
    (folder / "metrics.jsonl").write_text("one\n")
    checkpoint(folder, 5)
    return folder


def test_a_copy_becomes_a_run_folder_with_the_newest_checkpoint(tmp_path: Path, store: object) -> None:
    folder = run_folder(tmp_path)
    mirror = Mirror.of("memory://bucket/runs", folder)
    mirror.push(folder)
    checkpoint(folder, 10)
    (folder / "metrics.jsonl").write_text("one\ntwo\n")
    mirror.push(folder)
    made = fetch("memory://bucket/runs/ppo", tmp_path / "there")
    assert made == tmp_path / "there" / "ppo"
    assert (made / "metrics.jsonl").read_text() == "one\ntwo\n"
    assert [p.name for p in (made / "checkpoints").iterdir()] == ["step_000010"]
    assert (made / "checkpoints" / "step_000010" / "actor" / "index.json").read_text() == "weights of 10"


def test_a_checkpoint_that_was_deleted_here_is_deleted_there(tmp_path: Path, store) -> None:
    folder = run_folder(tmp_path)
    checkpoint(folder, 10)
    mirror = Mirror.of("memory://bucket", folder)
    mirror.push(folder)
    for path in sorted((folder / "checkpoints" / "step_000005").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (folder / "checkpoints" / "step_000005").rmdir()
    mirror.push(folder)
    assert not store.exists("/bucket/ppo/checkpoints/step_000005/state.json")
    assert store.exists("/bucket/ppo/checkpoints/step_000010/state.json")


def test_the_copy_of_another_run_is_not_taken_over(tmp_path: Path, store: object) -> None:
    folder = run_folder(tmp_path)
    mirror = Mirror.of("memory://bucket", folder)
    mirror.require_free()
    mirror.push(folder)
    with pytest.raises(CheckpointError, match=r"holds the checkpoints of a run already, the newest of step 5"):
        mirror.require_free()


def test_a_checkpoint_that_was_written_again_goes_up_again(tmp_path: Path, store) -> None:
    """The same step of a run that went on from an earlier one: the name says nothing."""
    folder = run_folder(tmp_path)
    mirror = Mirror.of("memory://bucket", folder)
    mirror.push(folder)
    place = folder / "checkpoints" / "step_000005"
    (place / "actor" / "index.json").write_text("other weights")
    (place / "state.json").write_text('{"seconds": 2}')
    mirror.push(folder)
    assert store.cat_file("/bucket/ppo/checkpoints/step_000005/actor/index.json") == b"other weights"


def test_a_copy_that_broke_off_is_not_taken(tmp_path: Path, store) -> None:
    """What marks a checkpoint as complete goes up last."""
    folder = run_folder(tmp_path)
    mirror = Mirror.of("memory://bucket", folder)
    mirror.push(folder)
    checkpoint(folder, 10)
    order: list[str] = []
    real = store.put_file

    def broken(source: str, target: str) -> None:
        order.append(target)
        if target.endswith("step_000010/state.json"):
            raise OSError("the connection broke")
        real(source, target)

    store.put_file = broken
    try:
        with pytest.raises(CheckpointError, match="the connection broke"):
            mirror.push(folder)
    finally:
        del store.put_file
    assert any(target.endswith("step_000010/actor/index.json") for target in order)
    made = fetch("memory://bucket/ppo", tmp_path / "there")
    assert [p.name for p in (made / "checkpoints").iterdir()] == ["step_000005"]


@pytest.mark.parametrize(
    ("url", "said"), [("memory://nothing", "no complete checkpoint"), ("wrong://x", "not an address that fsspec knows")]
)
def test_an_address_without_a_run_is_named(tmp_path: Path, store: object, url: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        fetch(url, tmp_path)


def test_a_folder_that_is_there_is_not_overwritten(tmp_path: Path, store: object) -> None:
    folder = run_folder(tmp_path)
    Mirror.of("memory://bucket", folder).push(folder)
    with pytest.raises(CheckpointError, match="is there already"):
        fetch("memory://bucket/ppo", folder.parent)
