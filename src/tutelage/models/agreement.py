"""Small agreements between the ranks of a process group: JSON values, rows of tensors, errors.

Every function is collective: all ranks of the group call it, in the same order.  Nothing is pickled.
Shapes: B rows of all ranks, b rows of one.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutelage import errors
from tutelage.errors import TrainingError, TutelageError


def gather_json(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """The values of all ranks, in the order of the ranks; floats come out as they went in, to the bit."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    return [json.loads(bytes(part.cpu().numpy().tobytes()).decode()) for part in gather_rows(data, group, device)]


def gather_rows(rows: Tensor, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """The tensors (b, ...) of all ranks, b possibly different, the other sizes and the type equal."""
    size = dist.get_world_size(group)
    home, rows = rows.device, rows.to(device).contiguous()
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([rows.shape[0]], device=device), group=group)
    lens = [int(count) for count in counts]
    padded = rows.new_zeros(max(*lens, 1), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    found = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(found, padded, group=group)
    return [part[:count].to(home) for part, count in zip(found, lens, strict=True)]


def most(count: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest count of any rank."""
    found = torch.tensor([count], dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return int(found)


def agree(error: Exception | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise on every rank where one rank brings an error: that of the first such rank, named in the text.

    A TutelageError keeps its class; anything else is itself on its own rank and a TrainingError on the others.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = torch.tensor([size if error is None else rank], dtype=torch.int64, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    failed = int(first)
    if failed == size:
        return
    kind, what, fix = gather_json(_described(error), group, device)[failed]
    if failed == rank and not isinstance(error, TutelageError):
        assert error is not None
        raise error
    found = getattr(errors, kind, TrainingError)
    raise found(f"{what} (on rank {failed})", fix=fix) from (error if failed == rank else None)


def _described(error: Exception | None) -> tuple[str, str, str]:
    if isinstance(error, TutelageError):
        return type(error).__name__, error.what, error.fix
    return "TrainingError", f"{type(error).__name__}: {error}", ""
