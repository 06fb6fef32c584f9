"""How the arguments of one call are cut over the ranks of a role, and where the rows of a reply belong.

Pure: the driver plans with it where it holds the arguments, the ranks where they are results of other calls.  Every
rank makes the same plan from the same row counts and tokens.   Shapes: B rows of the call, b rows of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import ShapeError
from tutelage.layout import DATA_AXES, WHOLE_WEIGHT_AXES, Dispatch, Layout
from tutelage.sharing import balanced
from tutelage.transport.ray.rows import Rows, reply_rows
from tutelage.types import Rollout

AXES_OF = {Dispatch.ROWS: DATA_AXES, Dispatch.GENERATE: WHOLE_WEIGHT_AXES, Dispatch.MINIBATCH: DATA_AXES}


@dataclass(frozen=True)
class Part:
    """The rows of a call that one rank works on.

    index  (b,) increasing rows of the call; of a filler: row 0, whose result is dropped.
    total  B.
    pairs  the rows are preference pairs.
    """

    index: Tensor
    total: int
    filler: bool = False
    pairs: bool = False


@dataclass(frozen=True)
class Plan:
    """split: which arguments are cut by rows, in their order; the others go to every rank whole."""

    split: tuple[bool, ...]
    parts: tuple[Part, ...]


def parts_of(dispatch: Dispatch, layout: Layout) -> int:
    return layout.parts(AXES_OF[dispatch]) if dispatch in AXES_OF else 1


def part_of(dispatch: Dispatch, layout: Layout, rank: int) -> int:
    return layout.part(rank, AXES_OF[dispatch]) if dispatch in AXES_OF else 0


def replies(dispatch: Dispatch, layout: Layout, rank: int) -> bool:
    """Whether this rank's reply is a part of the result."""
    if dispatch is Dispatch.EACH:
        return True
    if dispatch is Dispatch.ALL:
        return rank == 0
    answers = layout.replies(rank, AXES_OF[dispatch])
    return answers and (dispatch is not Dispatch.MINIBATCH or part_of(dispatch, layout, rank) == 0)


def row_plan(name: str, arguments: Sequence[Rows | None], count: int) -> Plan:
    """Cut by the tokens of the first batch among the arguments (of the first with rows, where none is a batch).

    Raises ShapeError where nothing has rows, and where two batches differ in their rows.
    """
    known = [rows for rows in arguments if rows is not None]
    if not known:
        raise ShapeError(f"{name} is split by rows, but none of its {len(arguments)} arguments has rows")
    lead = next((rows for rows in known if rows.batch), known[0])
    for rows in known:
        if rows.batch and len(rows) != len(lead):
            raise ShapeError(f"{name} got batches of {len(lead)} and of {len(rows)} rows")
    split = tuple(rows is not None and len(rows) == len(lead) for rows in arguments)
    total = len(lead)
    parts = tuple(
        Part(index, total, pairs=lead.pairs)
        if len(index) or not total
        else Part(torch.zeros(1, dtype=torch.int64), total, filler=True, pairs=lead.pairs)
        for index in balanced(lead.tokens, count)
    )
    return Plan(split, parts)


def reply_places(name: str, dispatch: Dispatch, part: Part, value: Any) -> Tensor | None:
    """Where the rows of a part's reply stand in the whole result; None for a reply of None.

    A row per row of the part; n consecutive rows for GENERATE (n samples of a prompt); for pairs also two, all chosen
    before all rejected.  Raises ShapeError for another count, and for a reply without rows.
    """
    if value is None:
        return None
    rows = reply_rows(value)
    if rows is None:
        raise ShapeError(
            f"{name} is split by rows, and a rank replied with {type(value).__name__}, which has none",
            fix="declare it ALL, EACH or MINIBATCH in the role's DISPATCH, or return a value per row",
        )
    if part.filler:
        return torch.zeros(0, dtype=torch.int64)
    given, got = len(part.index), len(rows)
    if got == given:
        return part.index
    if dispatch is Dispatch.GENERATE and given and got % given == 0:
        n = got // given
        return (part.index[:, None] * n + torch.arange(n)).flatten()
    if part.pairs and got == 2 * given:
        return torch.cat([part.index, part.index + part.total])
    raise ShapeError(f"{name} got {given} rows and replied with {got}")


def with_global_groups(value: Any, part: Part) -> Any:
    """A generated rollout whose `group` counts the prompts of the whole batch, not those of one rank."""
    if isinstance(value, Rollout) and not part.filler:
        return value.adding(group=part.index.to(value.group.device)[value.group])
    return value
