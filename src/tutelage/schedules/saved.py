"""Batches as tensors and JSON text, and back: how a checkpoint holds rollouts that were generated ahead.

Nothing is pickled: the classes that may come back are the ones listed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from tutelage.errors import CheckpointError
from tutelage.rollout.partial import Sample
from tutelage.types import Prompts, Ragged, Rollout, Scores, Sequences

KIND = "kind"
CLASSES: dict[str, type] = {cls.__name__: cls for cls in (Prompts, Ragged, Rollout, Scores, Sequences)}
WHAT_FITS = "keep ground truths to text, numbers, lists and mappings, or use schedule.kind=synchronous"


def packed(batch: Any) -> dict[str, Any]:
    """{"kind": class, column: tensor, packed column or JSON text}: what `engines.state.flatten` takes apart.

    Raises CheckpointError for a column that is neither a tensor, one of `CLASSES`, nor made of JSON values and tuples.
    """
    name = type(batch).__name__
    if CLASSES.get(name) is not type(batch):
        raise CheckpointError(f"a {name} cannot be kept in a checkpoint", fix=f"only {', '.join(CLASSES)} can")
    columns = [f.name for f in fields(CLASSES[name])]
    return {KIND: name, **{column: _column(getattr(batch, column), column) for column in columns}}


def _column(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()  # a tensor of two columns is saved twice
    if type(value) in CLASSES.values():
        return packed(value)
    return _text(value, f"the column {name}")


def _text(value: Any, what: str) -> str:
    try:
        return json.dumps(_marked(value))
    except TypeError as error:
        raise CheckpointError(
            f"{what} of rollouts generated ahead cannot be kept in a checkpoint: {error}", fix=WHAT_FITS
        ) from error


def _marked(value: Any) -> Any:
    """JSON knows no tuples and only text as keys: {"t": [...]} is a tuple, {"m": [[key, value]...]} a mapping."""
    if isinstance(value, tuple):
        return {"t": [_marked(item) for item in value]}
    if isinstance(value, Mapping):
        return {"m": [[_marked(key), _marked(item)] for key, item in value.items()]}
    return [_marked(item) for item in value] if isinstance(value, list) else value


def unpacked(saved: Mapping[str, Any]) -> Any:
    """The batch that `packed` took apart.  Raises CheckpointError where it is none."""
    cls = CLASSES.get(saved.get(KIND, ""))
    if cls is None or set(saved) != {KIND, *(f.name for f in fields(cls))}:
        raise CheckpointError(
            f"{saved.get(KIND)!r} with the columns {', '.join(sorted(saved))} is no saved batch",
            fix="resume from another checkpoint",
        )
    return cls(**{name: _restored(value) for name, value in saved.items() if name != KIND})


def _restored(value: Any) -> Any:
    if isinstance(value, Mapping):
        return unpacked(value)
    return _unmarked(json.loads(value)) if isinstance(value, str) else value


def packed_samples(samples: Sequence[Sample]) -> str:
    """Responses in progress as JSON text.  Raises CheckpointError as `packed`."""
    return _text([tuple(getattr(s, f.name) for f in fields(Sample)) for s in samples], "the responses in progress")


def unpacked_samples(text: str) -> list[Sample]:
    return [Sample(*values) for values in _unmarked(json.loads(text))]


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "t" in value:
        return tuple(_unmarked(item) for item in value["t"])
    return {_unmarked(key): _unmarked(item) for key, item in value["m"]}
