"""A run is a folder: its settings, lineage, metrics, samples, checkpoints and figures."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tutelage.errors import CheckpointError
from tutelage.native.build import described
from tutelage.reports.metrics_log import to_json, write_bytes

PACKAGES = ("tutelage", "torch", "transformers", "tokenizers", "peft", "datasets", "safetensors", "numpy")


def create(output_dir: str, name: str) -> Path:
    """A new run folder: `output_dir/name`, or `name-2`, `name-3`... where that is there already."""
    folder = fresh(Path(output_dir) / name)
    for part in ("samples", "checkpoints", "figures"):
        (folder / part).mkdir()
    return folder


def names_of(wanted: Path) -> Iterator[Path]:
    """`wanted`, `wanted-2`, `wanted-3`..."""
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 10_000))


def next_name(output_dir: str, name: str) -> str:
    """The name that `create` would give a run folder at this moment."""
    return next((folder.name for folder in names_of(Path(output_dir) / name) if not folder.exists()), name)


def fresh(wanted: Path) -> Path:
    """Make the folder `wanted`, or the first free one of `wanted-2`, `wanted-3`...  Raises CheckpointError."""
    for folder in names_of(wanted):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise CheckpointError(
                f"the run folder {folder} cannot be made: {error.strerror}", fix="set output_dir to a writable folder"
            ) from error
        return folder
    raise CheckpointError(f"{wanted.parent} holds 10,000 runs named {wanted.name}", fix="choose another name")


def write_json(path: Path, value: Any) -> None:
    """Written beside and renamed, so that a reader never sees half a file."""
    write_bytes(path, (json.dumps(to_json(value), indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist", fix="name the folder of a run, such as runs/demo") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}", fix="resume from another checkpoint") from error


def write_samples(folder: Path, phase: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """samples/PHASE.jsonl: one held-out answer a line."""
    write_jsonl(folder / "samples" / f"{phase}.jsonl", rows)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(to_json(row), ensure_ascii=False) + "\n" for row in rows)
    write_bytes(path, text.encode())


def lineage(seed: int, data: Mapping[str, str], models: Mapping[str, str]) -> dict[str, Any]:
    """What a run was made of: fingerprints of data and models, versions of packages, machine, seed.

    Of the machine also whether CPU kernels were compiled, or why not: the last bits of bfloat16 depend on it.
    """
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    machine = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "kernels": described(),
    }
    return {"seed": seed, "data": dict(data), "models": dict(models), "versions": versions, "machine": machine}


def model_fingerprint(path: str) -> str:
    """SHA-256 of the file names, sizes, settings and weights of a model folder; of a hub name, the name itself."""
    folder = Path(path)
    digest = hashlib.sha256()
    if not folder.is_dir():
        digest.update(path.encode())
        return digest.hexdigest()
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        if file.suffix in (".json", ".safetensors"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
