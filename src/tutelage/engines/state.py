"""Engine state as tensors and plain values: what safetensors and JSON can hold, nothing pickled.

A state is a dict of str keys whose leaves are tensors, or None, bool, int, float, str, and lists of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tutelage.errors import CheckpointError

SEPARATOR = "/"


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by path, the rest as nested dicts): paths join the keys with "/".

    Raises CheckpointError for a key that holds "/" or is no string, and for a leaf of another type.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _split(state, "", tensors)


def _split(state: Mapping[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str) or SEPARATOR in key:
            raise CheckpointError(f"state key {key!r} cannot be saved", fix="use strings without a slash")
        if isinstance(value, Tensor):
            tensors[f"{path}{key}"] = value.detach().contiguous()
        elif isinstance(value, Mapping):
            plain[key] = _split(value, f"{path}{key}{SEPARATOR}", tensors)
        elif _is_plain(value):
            plain[key] = value
        else:
            raise CheckpointError(f"state {path}{key} is a {type(value).__name__}, which is neither tensor nor JSON")
    return plain


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def unflatten(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The state that `flatten` took apart. Raises CheckpointError where a tensor's path ends at a plain value."""
    state: dict[str, Any] = {key: unflatten({}, v) if isinstance(v, Mapping) else v for key, v in plain.items()}
    for path, tensor in tensors.items():
        *parents, leaf = path.split(SEPARATOR)
        place = state
        for key in parents:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise CheckpointError(f"the tensor {path} lies below a plain value", fix="use an intact checkpoint")
        place[leaf] = tensor
    return state
