"""Checkpoints: written beside and renamed into place; an ordinary model folder plus everything a step depends on.

    checkpoints/step_000010/  model/          Hugging Face folder of the role that is trained for use
                              ROLE/           trainable weights, optimiser moments, counters, for any number of ranks
                              state.json      step, data cursor, KL controller, alarms
    checkpoints/best/         model/, quality.json

Nothing is pickled.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tutelage.engines.state import flatten, unflatten
from tutelage.errors import CheckpointError
from tutelage.runfolder import read_json, write_json

COMPLETE = "state.json"
TENSORS = "tensors.safetensors"
PLAIN = "values.json"
STATE_KEYS = ("done", "stopped", "seconds", "algorithm", "source", "alarms", "evaluator", "evaluations")


class Checkpoints:
    """The checkpoints of one run.  `exported` names the role whose model folder is written; roles are handles."""

    def __init__(self, folder: Path, exported: str, keep: int) -> None:
        self.folder = folder
        self.exported = exported
        self.keep = keep

    def save(self, step: int, roles: Mapping[str, Any], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then delete the oldest beyond `keep`.  Where it fails, the earlier ones stay intact."""
        target = self.folder / f"step_{step:06d}"
        partial = self.folder / f".step_{step:06d}.partial"
        self._require_space(target, sum(role.checkpoint_bytes().gather() for role in roles.values()))
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            roles[self.exported].save_pretrained(partial / "model").gather()
            for name, role in roles.items():
                role.save_state(partial / name).gather()
            write_json(partial / COMPLETE, dict(state))
            put_in_place(partial, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise self._write_failed(target, error) from error
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step_{old:06d}")
        return target

    def _write_failed(self, target: Path, error: Exception) -> CheckpointError:
        free = shutil.disk_usage(self.folder).free
        last = self.latest()
        kept = f"the last good one is {last.name}" if last else "there is no earlier one"
        reason = error.what if isinstance(error, CheckpointError) else error
        return CheckpointError(
            f"checkpoint {target} cannot be written: {reason} ({size_text(free)} free without it); {kept}",
            fix="free disk space, then "
            + ("`tutelage resume` the run, or lower checkpoint.keep" if last else "start again"),
        )

    def _require_space(self, target: Path, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise self._write_failed(target, OSError(f"it needs {size_text(needed)}"))

    def save_best(self, step: int, role: Any, quality: float, measured_by: str) -> bool:
        """Keep this model when its held-out quality is above the best so far's, or there is none yet.  True when kept.

        A quality that is not a number is above none.
        """
        target, partial = self.folder / "best", self.folder / ".best.partial"
        if (target / "quality.json").exists():
            best = float(read_json(target / "quality.json")["quality"])  # a NaN is written as text
            if math.isnan(quality) or best >= quality:
                return False
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            role.save_pretrained(partial / "model").gather()
            write_json(partial / "quality.json", {"step": step, "quality": quality, "measured_by": measured_by})
            put_in_place(partial, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise self._write_failed(target, error) from error
        return True

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        found = self.folder.glob("step_*")
        return sorted(self.step_of(p) for p in found if (p / COMPLETE).exists())

    @staticmethod
    def step_of(path: Path) -> int:
        return int(path.name.removeprefix("step_"))

    def latest(self) -> Path | None:
        steps = self.steps()
        return self.folder / f"step_{steps[-1]:06d}" if steps else None

    def load(self, path: Path, roles: Mapping[str, Any]) -> dict[str, Any]:
        """Put every role's state back; returns the controller's."""
        for name, role in roles.items():
            role.load_state(path / name).gather()
        state = read_json(path / COMPLETE)
        missing = [key for key in STATE_KEYS if not isinstance(state, dict) or key not in state]
        if missing:
            raise CheckpointError(
                f"{path / COMPLETE} has no {', '.join(missing)}",
                fix="delete this checkpoint folder and resume from the one before it",
            )
        return state


def put_in_place(partial: Path, target: Path) -> None:
    """Rename `partial` to `target`; what was there before goes only when the new one is in place."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)


def size_text(size: int) -> str:
    """`12 MB`, or `340 kB` below one."""
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def save_plain(folder: Path, state: Mapping[str, Any]) -> None:
    """A state of tensors and JSON values (`engines.state`) that one process holds."""
    tensors, plain = flatten(state)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    write_json(folder / PLAIN, plain)


def load_plain(folder: Path) -> dict[str, Any]:
    """What `save_plain` wrote.  Raises CheckpointError for a damaged file."""
    try:
        tensors: dict[str, torch.Tensor] = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / TENSORS} cannot be read: {error}",
            fix="delete this checkpoint folder and resume from the one before it",
        ) from error
    return unflatten(tensors, read_json(folder / PLAIN))
