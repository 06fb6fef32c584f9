"""A result on the cluster: references to its parts, columns that were added to it, and the calls behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from tutelage.errors import PendingError
from tutelage.transport.pending import Unreadable
from tutelage.transport.ray.ledger import Call
from tutelage.transport.ray.wire import Given, Parts


@dataclass(frozen=True, eq=False)
class Source:
    """Where a value comes from.

    call     None: the driver holds `value`.  Else the value lies in `refs`, whose reports are those of `ranks`.
    each     the value is the list of all parts.
    columns  sources to be added to it.
    """

    call: Call | None = None
    value: Any = None
    refs: tuple[Any, ...] = ()
    ranks: tuple[int, ...] = ()
    each: bool = False
    columns: dict[str, Source] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether the driver holds all of it."""
        return self.call is None and not self.columns

    def adding(self, columns: dict[str, Source]) -> Source:
        if self.known and all(column.known for column in columns.values()):
            return Source(value=self.value.adding(**{name: column.value for name, column in columns.items()}))
        return replace(self, columns={**self.columns, **columns})

    def calls(self) -> Iterator[Call]:
        """Everything that must be done before the value exists."""
        if self.call is not None:
            yield self.call
        for column in self.columns.values():
            yield from column.calls()

    def wire(self, reports: list[Any]) -> Given | Parts:
        """As it is sent to ranks; the reports they need to read it with are added to `reports`."""
        if self.call is None:
            return Given(self.value, {name: column.wire(reports) for name, column in self.columns.items()})
        numbers = tuple(range(len(reports), len(reports) + len(self.ranks)))
        reports.extend(self.call.reports[rank] for rank in self.ranks)
        columns = {name: column.wire(reports) for name, column in self.columns.items()}
        return Parts(list(self.refs), numbers, self.each, columns)


class RayPending(Unreadable):
    """A pending result of the ray transport; `gather` brings it to the driver."""

    __slots__ = ("_gathered", "_label", "_source")

    def __init__(self, source: Source, label: str, gathered: Callable[[Source], Any]) -> None:
        self._source = source
        self._label = label
        self._gathered = gathered

    def gather(self) -> Any:
        return self._gathered(self._source)

    def adding(self, **columns: Any) -> RayPending:
        """The batch with these columns, each of which may be pending and lie in other parts than the batch."""
        added = self._source.adding({name: source_of(column) for name, column in columns.items()})
        return RayPending(added, self._label, self._gathered)

    def _touched(self, what: str) -> NoReturn:
        raise PendingError(
            f"{what} of the pending result of {self._label} was read before it was gathered",
            fix="call .gather() on it first, or pass the pending result itself to another role",
        )


def source_of(value: Any) -> Source:
    """The source of a pending argument; any other argument is held by the driver."""
    return value._source if isinstance(value, RayPending) else Source(value=value)
