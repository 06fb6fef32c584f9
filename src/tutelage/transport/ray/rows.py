"""Row-wise values: how many rows, which tokens, some of them, several after each other.

A batch (Rollout, Pairs, Demonstrations, Sequences, Prompts, or anything with `item_tokens` and `select`) has rows of
its own; a Ragged, Scores or Tensor has the rows of its first axis.   Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import ShapeError
from tutelage.types import Prompts, Ragged, Scores, Sequences


@dataclass(frozen=True)
class Rows:
    """What a plan reads of a value: tokens (B,) int64 of its rows, and whether it is a batch rather than a column."""

    tokens: Tensor
    batch: bool
    pairs: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


def is_batch(value: Any) -> bool:
    return isinstance(value, (Sequences, Prompts)) or (hasattr(value, "item_tokens") and hasattr(value, "select"))


def rows_of(value: Any) -> Rows | None:
    """The rows of a value; None for a value without rows."""
    if isinstance(value, Sequences):
        return Rows(value.tokens.lens, batch=True)
    if isinstance(value, Prompts):
        return Rows(torch.tensor([len(p) for p in value.tokens], dtype=torch.int64), batch=True)
    if is_batch(value):
        pairs = hasattr(value, "sides")  # two sequences an item
        return Rows(value.item_tokens().cpu(), batch=True, pairs=pairs)
    if isinstance(value, Ragged):
        return Rows(value.lens.cpu(), batch=False)
    if isinstance(value, Scores):
        return Rows(torch.ones(len(value.total), dtype=torch.int64), batch=False)
    if isinstance(value, Tensor) and value.ndim:
        return Rows(torch.ones(len(value), dtype=torch.int64), batch=False)
    return None


def whole_columns(batch: Any) -> tuple[str, ...]:
    """Columns of a batch with rows of their own, which every part of it has whole (`Rollout.baseline`)."""
    return tuple(getattr(type(batch), "_whole", ()))


def reply_rows(value: Any) -> Rows | None:
    """As `rows_of`, for a reply: a list or a tuple has a row per entry (texts, say)."""
    if isinstance(value, (list, tuple)):
        return Rows(torch.ones(len(value), dtype=torch.int64), batch=False)
    return rows_of(value)


def select(value: Any, index_b: Tensor) -> Any:
    """Rows `index_b`, in that order."""
    if isinstance(value, Prompts):
        return value.select(index_b.tolist())
    if isinstance(value, (list, tuple)):
        return type(value)(value[i] for i in index_b.tolist())
    if isinstance(value, Tensor):
        return value[index_b]
    return value.select(index_b)


def concat(values: Sequence[Any]) -> Any:
    """The rows of several values of one type, after each other.  Raises ShapeError for values of different types."""
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise ShapeError(f"parts of one result have different types: {sorted({type(v).__name__ for v in values})}")
    if len(values) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, (list, tuple)):
        return type(first)(entry for value in values for entry in value)
    if isinstance(first, Prompts):
        names = ["tokens", "ids", "truths", "messages"]
        names += [] if first.environments is None else ["environments"]
        joined: dict[str, Any] = {n: tuple(row for value in values for row in getattr(value, n)) for n in names}
        return replace(first, **joined)
    return type(first).concat(values)


def assemble(fetch: Callable[[list[int]], list[Any]], places: Sequence[Tensor], wanted_b: Tensor | None) -> Any:
    """Rows of a value that lies in parts.

    fetch    numbers of parts -> the parts; only parts that hold wanted rows are fetched.
    places   of each part, where its rows stand in the whole; together 0..B-1.
    wanted_b increasing rows of the whole, or None for all of them.

    Raises ShapeError where the parts do not make up the whole.
    """
    all_B = torch.cat(list(places))
    if not torch.equal(all_B.sort().values, torch.arange(len(all_B))):
        raise ShapeError(f"the {len(places)} parts of a result do not hold each of its {len(all_B)} rows once")
    picks = [_picked(place, wanted_b) for place in places]
    used = [part for part, pick in enumerate(picks) if len(pick)] or [0]
    parts = [
        value if len(picks[part]) == len(places[part]) else select(value, picks[part])
        for part, value in zip(used, fetch(used), strict=True)
    ]
    joined = concat(parts)
    order_b = torch.argsort(torch.cat([places[part][picks[part]] for part in used]))
    return joined if torch.equal(order_b, torch.arange(len(order_b))) else select(joined, order_b)


def _picked(place: Tensor, wanted_b: Tensor | None) -> Tensor:
    if wanted_b is None:
        return torch.arange(len(place))
    return torch.nonzero(torch.isin(place, wanted_b)).squeeze(1)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors inside a value."""
    return sum(t.numel() * t.element_size() for t in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for column in fields(value):
            yield from _tensors(getattr(value, column.name))


def on_cpu(value: Any) -> Any:
    """The value with every tensor inside it on the CPU, without gradient; without tensors, the value itself."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_cpu(entry) for key, entry in value.items()} if any(True for _ in _tensors(value)) else value
    if type(value) in (list, tuple):
        return type(value)(on_cpu(entry) for entry in value)
    if is_dataclass(value) and not isinstance(value, type) and any(True for _ in _tensors(value)):
        changed = {f.name: on_cpu(getattr(value, f.name)) for f in fields(value) if f.init}
        return replace(value, **changed)
    return value
