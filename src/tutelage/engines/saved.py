"""Tensors of many ranks in a folder that any number of ranks can read: safetensors files and one JSON index.

    FOLDER/index.json                {"format": 1, "plain": {...}, "tensors": {NAME: {"shape", "chunks": [...]}}}
    FOLDER/rank_00000.safetensors    the chunks that rank 0 holds, under the names of their tensors

A chunk is a block of a tensor: its file, its offset and its shape.  Of ranks with the same block the first writes it.
Nothing is pickled; only the files that the index names are opened, and only as safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tutelage.engines.ranks import Ranks
from tutelage.errors import CheckpointError
from tutelage.models.sharding import local, place

INDEX = "index.json"
FORMAT = 1
DAMAGED = "delete this checkpoint folder and resume from the one before it"


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], ranks: Ranks) -> None:
    """Write the folder, the index last. Collective; a rank brings the tensors it has a part of, or a copy.

    Raises CheckpointError everywhere.
    """
    everywhere = ranks.from_all({name: [*place(tensor), list(tensor.shape)] for name, tensor in tensors.items()})
    index: dict[str, Any] = {
        name: {"shape": whole, "chunks": []} for theirs in everywhere for name, (_, _, whole) in theirs.items()
    }
    mine: dict[str, Tensor] = {}
    for name in index:
        seen: set[tuple[int, ...]] = set()
        for rank, theirs in enumerate(everywhere):
            if name not in theirs:
                continue
            shape, offset, _ = theirs[name]
            if math.prod(shape) == 0 or tuple(offset) in seen:
                continue
            seen.add(tuple(offset))
            index[name]["chunks"].append({"file": _file(rank), "offset": offset, "shape": shape})
            if rank == ranks.rank:
                mine[name] = local(tensors[name]).detach().contiguous()
    ranks.agree(_written(folder, f"{_file(ranks.rank)}", mine))
    if ranks.rank == 0:
        content = json.dumps({"format": FORMAT, "plain": dict(plain), "tensors": index})
        ranks.agree(_written_text(folder / INDEX, content))
    else:
        ranks.agree(None)


def _file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _written(folder: Path, name: str, tensors: dict[str, Tensor]) -> CheckpointError | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if tensors:
            save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / name)
    except (OSError, SafetensorError) as error:
        return CheckpointError(f"{folder / name} cannot be written: {error}", fix="free disk space, or check the path")
    return None


def _written_text(file: Path, content: str) -> CheckpointError | None:
    try:
        file.write_text(content)
    except OSError as error:
        return CheckpointError(f"{file} cannot be written: {error}", fix="free disk space, or check the path")
    return None


@dataclass(frozen=True, eq=False)
class SavedTensors:
    """A folder that `save_tensors` wrote, opened for reading; local, so errors are one rank's."""

    folder: Path
    plain: dict[str, Any]
    tensors: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, folder: Path) -> SavedTensors:
        """Raises CheckpointError for an index that is missing, damaged or of another format."""
        file = folder / INDEX
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", fix=DAMAGED) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{file} is not an index of format {FORMAT}", fix=DAMAGED)
        plain, tensors = content.get("plain"), content.get("tensors")
        if not isinstance(plain, dict) or not isinstance(tensors, dict):
            raise CheckpointError(f"{file} has no plain values or no tensors", fix=DAMAGED)
        for name, entry in tensors.items():
            if not _well_formed(entry):
                raise CheckpointError(f"{file}: the entry of {name} cannot be used", fix=DAMAGED)
        return cls(folder, plain, tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name]["shape"])

    def read(self, name: str, like: Tensor) -> Tensor:
        """This rank's part of a tensor, as `like` is placed: a tensor of its local shape, type and device.

        Raises CheckpointError for a file that is missing, damaged or lacks the block.
        """
        shape, offset = place(like)
        target = torch.empty(shape, dtype=like.dtype)
        covered = 0
        for chunk in self.tensors[name]["chunks"]:
            within = overlap(offset, shape, chunk["offset"], chunk["shape"])
            if within is None:
                continue
            into, out_of = within
            target[into] = self._block(name, chunk, out_of).to(like.dtype)
            covered += target[into].numel()
        if covered != target.numel():
            raise CheckpointError(f"{self.folder / INDEX}: the chunks of {name} do not cover it", fix=DAMAGED)
        return target.to(local(like).device)

    def _block(self, name: str, chunk: Mapping[str, Any], out_of: tuple[slice, ...]) -> Tensor:
        file = self.folder / chunk["file"]
        try:
            with safe_open(str(file), framework="pt") as held:
                if not out_of:
                    found = held.get_tensor(name)
                else:
                    part = held.get_slice(name)
                    if list(part.get_shape()) != list(chunk["shape"]):
                        raise CheckpointError(f"{file}: {name} has shape {part.get_shape()}", fix=DAMAGED)
                    found = part[out_of]
        except (OSError, SafetensorError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{file} cannot be read: {error}", fix=DAMAGED) from error
        assert isinstance(found, Tensor)
        return found

    def names(self, prefix: str) -> Iterator[str]:
        return (name for name in self.tensors if name.startswith(prefix))


def _well_formed(entry: Any) -> bool:
    def sizes(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value)

    if not isinstance(entry, dict) or not sizes(entry.get("shape")) or not isinstance(entry.get("chunks"), list):
        return False
    return all(
        isinstance(chunk, dict)
        and isinstance(chunk.get("file"), str)
        and Path(chunk["file"]).name == chunk["file"]
        and chunk["file"].endswith(".safetensors")
        and sizes(chunk.get("offset"))
        and sizes(chunk.get("shape"))
        and len(chunk["offset"]) == len(chunk["shape"]) == len(entry["shape"])
        for chunk in entry["chunks"]
    )


def overlap(
    offset: tuple[int, ...], shape: tuple[int, ...], other_offset: list[int], other_shape: list[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two blocks of one tensor overlap, as slices of the first and of the second; None where they do not."""
    first, second = [], []
    for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        first.append(slice(low - a, high - a))
        second.append(slice(low - b, high - b))
    return tuple(first), tuple(second)
