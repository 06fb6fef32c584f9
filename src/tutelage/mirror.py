"""A copy of a run's checkpoints in an object store, or at any other address that fsspec knows.

    URL/NAME/  config.yaml, lineage.json, metrics.jsonl...     as in the run folder
               checkpoints/step_000010/                        state.json goes last: without it a copy is not complete

The run works in its folder; its copy is brought up to date after each checkpoint.  `fetch` makes a run folder of a
copy, on any machine.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from tutelage.checkpoints import COMPLETE, Checkpoints
from tutelage.errors import CheckpointError, MissingExtraError

CHECKPOINTS = "checkpoints"
BESIDE = ("config.yaml", "lineage.json", "preflight.json", "metrics.jsonl", "events.jsonl", "summary.json")


def store(url: str) -> tuple[Any, str]:
    """(file system, path in it).  Raises CheckpointError for an unknown protocol, MissingExtraError for its package."""
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{url} cannot be opened: {error}", fix="install the package that it names") from error
    except ValueError as error:
        raise CheckpointError(
            f"{url} is not an address that fsspec knows: {error}",
            fix="use s3://, gs://, file:// or another of its kinds",
        ) from error
    return fs, path.rstrip("/")


@dataclass(frozen=True)
class Mirror:
    """url: of the copy of this run."""

    url: str

    @classmethod
    def of(cls, place: str, folder: Path) -> Mirror:
        """The copy of a run folder below a place."""
        return cls(f"{place.rstrip('/')}/{folder.name}")

    def require_free(self) -> None:
        """Raises CheckpointError, before work is done, where the copy of another run is."""
        fs, root = store(self.url)
        try:
            steps = steps_in(fs, root)
        except Exception as error:
            raise self._failed("cannot be looked at", error) from error
        if steps:
            raise CheckpointError(
                f"{self.url} holds the checkpoints of a run already, the newest of step {steps[-1]}",
                fix=f"go on with it (`tutelage resume {self.url}`), or give this run another name or checkpoint.mirror",
            )

    def require_writable(self) -> None:
        """Raises CheckpointError, before work is done, where nothing can be written."""
        fs, root = store(self.url)
        try:
            fs.makedirs(root, exist_ok=True)
            fs.pipe_file(f"{root}/.writable", b"")
            fs.rm_file(f"{root}/.writable")
        except Exception as error:
            raise self._failed("cannot be written", error) from error

    def push(self, folder: Path) -> None:
        """Bring the copy up to date: checkpoints that are new or were written again go up, those that are gone go.

        Raises CheckpointError where the store refuses.
        """
        fs, root = store(self.url)
        local = Checkpoints(folder / CHECKPOINTS, "", 1)
        try:
            there = set(steps_in(fs, root))
            same = {step for step in there & set(local.steps()) if self._same(fs, root, folder, step)}
            for name in BESIDE:
                if (folder / name).is_file():
                    fs.put_file(str(folder / name), f"{root}/{name}")
            for step in there - same:
                fs.rm(f"{root}/{CHECKPOINTS}/{step_name(step)}", recursive=True)
            for name in (step_name(step) for step in local.steps() if step not in same):
                put_checkpoint(fs, folder / CHECKPOINTS / name, f"{root}/{CHECKPOINTS}/{name}")
        except Exception as error:
            raise self._failed("cannot be brought up to date", error) from error

    @staticmethod
    def _same(fs: Any, root: str, folder: Path, step: int) -> bool:
        """Whether the copy of a checkpoint is of this one: its state.json holds the seconds of the run so far."""
        place = f"{CHECKPOINTS}/{step_name(step)}/{COMPLETE}"
        return bool(fs.cat_file(f"{root}/{place}") == (folder / place).read_bytes())

    def _failed(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the copy of the run at {self.url} {what}: {type(error).__name__}: {error}",
            fix="look at the credentials and the space there, or remove checkpoint.mirror",
        )


def fetch(url: str, output_dir: Path) -> Path:
    """A run folder in `output_dir` from a copy, with its newest complete checkpoint.

    Raises CheckpointError where there is no complete checkpoint, and where the folder is there already.
    """
    fs, root = store(url)
    target = output_dir / root.rpartition("/")[2]
    if target.exists():
        raise CheckpointError(f"{target} is there already", fix="resume that folder, or move it away")
    try:
        steps = steps_in(fs, root)
        if not steps:
            raise CheckpointError(f"{url} has no complete checkpoint", fix="give the address of a run's copy")
        newest = step_name(steps[-1])
        for part in ("samples", "figures", CHECKPOINTS):
            (target / part).mkdir(parents=True)
        for name in BESIDE:
            if fs.exists(f"{root}/{name}"):
                fs.get_file(f"{root}/{name}", str(target / name))
        fs.get(f"{root}/{CHECKPOINTS}/{newest}/", str(target / CHECKPOINTS / newest), recursive=True)
    except CheckpointError:
        raise
    except Exception as error:
        shutil.rmtree(target, ignore_errors=True)
        raise CheckpointError(
            f"{url} cannot be fetched: {type(error).__name__}: {error}", fix="look at the address and the credentials"
        ) from error
    return target


def steps_in(fs: Any, root: str) -> list[int]:
    """Steps with a complete checkpoint in a copy, oldest first."""
    found = fs.glob(f"{root}/{CHECKPOINTS}/step_*/{COMPLETE}")
    return sorted(Checkpoints.step_of(Path(Path(path).parent.name)) for path in found)


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def put_checkpoint(fs: Any, source: Path, target: str) -> None:
    files = sorted(path for path in source.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda file: file.name == COMPLETE and file.parent == source):
        destination = f"{target}/{path.relative_to(source).as_posix()}"
        fs.makedirs(destination.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(path), destination)
