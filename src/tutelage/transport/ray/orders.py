"""What is sent to each rank for one call: planned here where the driver holds every argument, else by the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tutelage.errors import ShapeError
from tutelage.layout import Dispatch, Layout
from tutelage.sharing import shares
from tutelage.transport.ray import rows, split
from tutelage.transport.ray.pending import Source
from tutelage.transport.ray.split import Part


@dataclass(frozen=True)
class Orders:
    """by_rank: (payload, part) in the order of ranks.  reports: references to what the ranks read the arguments with.

    planned: a payload is a rank's own arguments.  Else it is the same for all ranks, with earlier results by reference.
    """

    by_rank: list[tuple[Any, Part | None]]
    reports: list[Any]
    planned: bool


def make_orders(
    name: str,
    dispatch: Dispatch,
    layout: Layout,
    sources: Sequence[Source],
    positional: int,
    keywords: tuple[str, ...],
    send: Callable[[Any], Any],
) -> Orders:
    """sources: of the positional, then of the keyword arguments.  send: called once for each different payload.

    Raises ShapeError where the arguments that the driver holds cannot be split as the protocol says.
    """

    def packed(values: Sequence[Any]) -> Any:
        return send((tuple(values[:positional]), dict(zip(keywords, values[positional:], strict=True))))

    if not all(source.known for source in sources):
        reports: list[Any] = []
        payload = packed([source.wire(reports) for source in sources])
        return Orders([(payload, None)] * layout.size, reports, planned=False)
    values = [source.value for source in sources]
    cut = [(packed(own), part) for own, part in _by_part(name, dispatch, layout, values)]
    if dispatch is Dispatch.EACH:
        return Orders(cut, [], planned=True)
    return Orders([cut[split.part_of(dispatch, layout, rank)] for rank in range(layout.size)], [], planned=True)


def _by_part(name: str, dispatch: Dispatch, layout: Layout, values: list[Any]) -> list[tuple[list[Any], Part | None]]:
    """The arguments of each part (EACH: of each rank), and its rows where they are split by rows."""
    count = split.parts_of(dispatch, layout)
    if dispatch in (Dispatch.ROWS, Dispatch.GENERATE):
        plan = split.row_plan(name, [rows.rows_of(value) for value in values], count)
        return [
            ([rows.select(v, part.index) if own else v for v, own in zip(values, plan.split, strict=True)], part)
            for part in plan.parts
        ]
    if dispatch is Dispatch.MINIBATCH:
        if len(values) < 2:
            raise ShapeError(f"{name} is a mini-batch call and got {len(values)} arguments, not a batch and a loss")
        return [([share, *values[1:]], None) for share in shares(values[0], values[1], count)]
    if dispatch is Dispatch.EACH:
        for value in values:
            if not isinstance(value, (list, tuple)) or len(value) != layout.size:
                raise ShapeError(f"{name} takes lists of {layout.size} entries, one a rank, and got {value!r:.80}")
        return [([value[rank] for value in values], None) for rank in range(layout.size)]
    return [(values, None)]
