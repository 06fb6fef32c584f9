"""Reference logprobs in a file: safetensors, nothing pickled; refused where it was made from something else.

Shapes: B sequences, R flat response tokens.

A row is found by its own tokens and its prompt's length, so a table answers for any batch of the rows it was made of.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tutelage.errors import CheckpointError, DataError
from tutelage.types import Ragged, Sequences

FORMAT = "1"
WORDS = {
    "format": "format of the file",
    "data": "data",
    "model": "model folder",
    "template": "chat template",
    "rows": "tokens of the rows (tokenizer, length limits, held-out part)",
    "dtype": "model.dtype",
    "quantize": "model.quantize",
}


def row_keys(sequences: Sequences) -> list[bytes]:
    """16 bytes for each row: a hash of its tokens and of where its response begins."""
    rows = zip(sequences.tokens.rows(), sequences.prompt_lens.tolist(), strict=True)
    return [
        hashlib.blake2b(
            prompt.to_bytes(8, "little") + row.to("cpu", torch.int64).numpy().tobytes(), digest_size=16
        ).digest()
        for row, prompt in rows
    ]


def rows_fingerprint(sequences: Sequences) -> str:
    """Of the rows and their order."""
    return hashlib.sha256(b"".join(row_keys(sequences))).hexdigest()


@dataclass(frozen=True, eq=False)
class ReferenceTable:
    """Logprobs (R,) of the response tokens of B rows, float32, and where each row is."""

    places: Mapping[bytes, int]
    logp: Ragged

    @classmethod
    def of(cls, sequences: Sequences, logp: Ragged) -> ReferenceTable:
        return cls({key: place for place, key in enumerate(row_keys(sequences))}, logp)

    def lookup(self, sequences: Sequences) -> Ragged:
        """The logprobs of these rows, in their order.  Raises DataError for a row that is not in the table."""
        keys = row_keys(sequences)
        missing = [row for row, key in enumerate(keys) if key not in self.places]
        if missing:
            raise DataError(
                f"{len(missing)} of {len(keys)} rows have no reference logprobs in the cache, first row {missing[0]}",
                fix="delete dpo.reference_cache, or name another file",
            )
        return self.logp.select(torch.tensor([self.places[key] for key in keys], dtype=torch.int64))

    def save(self, path: Path, key: Mapping[str, str]) -> None:
        """Written beside and renamed.  Raises CheckpointError where it cannot be written."""
        ordered = sorted(self.places, key=lambda name: self.places[name])
        index = torch.tensor([self.places[name] for name in ordered], dtype=torch.int64)
        kept = self.logp.select(index)
        tensors = {
            "keys": torch.tensor([list(name) for name in ordered], dtype=torch.uint8).reshape(len(ordered), 16),
            "lens": kept.lens.cpu().contiguous(),
            "logp": kept.flat.to("cpu", torch.float32).contiguous(),
        }
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, partial, {"key": json.dumps({"format": FORMAT, **key})})
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise CheckpointError(
                f"the reference cache {path} cannot be written: {error}", fix="free disk space, or name another file"
            ) from error

    @classmethod
    def read(cls, path: Path) -> ReferenceTable:
        """Raises DataError for a file that is damaged or of another kind."""
        try:
            with safe_open(str(path), framework="pt") as held:
                keys, lens, logp = (_tensor(held.get_tensor(name)) for name in ("keys", "lens", "logp"))
        except (OSError, SafetensorError) as error:
            raise _damaged(path, str(error)) from error
        fits = keys.ndim == 2 and keys.shape == (len(lens), 16) and lens.ndim == 1 and bool((lens >= 0).all())
        if not fits or keys.dtype != torch.uint8 or logp.shape != (int(lens.sum()),):
            raise _damaged(path, "its tensors do not fit each other")
        rows = keys.numpy()
        return cls({rows[place].tobytes(): place for place in range(len(rows))}, Ragged(logp, lens))


def require_same_key(path: Path, key: Mapping[str, str]) -> None:
    """Raises DataError, with what differs, unless the file was made under this key."""
    try:
        with safe_open(str(path), framework="pt") as held:
            text = (held.metadata() or {}).get("key", "")
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    try:
        saved = json.loads(text)
    except ValueError as error:
        raise _damaged(path, "it does not say what it was made from") from error
    wanted = {"format": FORMAT, **key}
    if not isinstance(saved, dict):
        raise _damaged(path, "it does not say what it was made from")
    names = dict.fromkeys([*wanted, *saved])
    differing = [WORDS.get(name, name) for name in names if saved.get(name) != wanted.get(name)]
    if differing:
        raise DataError(
            f"the reference cache {path} was made from something else; what differs: {', '.join(differing)}",
            fix="name another file in dpo.reference_cache, or delete this one to have it made again",
        )


def _tensor(found: object) -> Tensor:
    assert isinstance(found, Tensor)
    return found


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"the reference cache {path} cannot be read: {why}", fix="delete it to have it made again")
