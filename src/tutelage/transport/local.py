"""The transport of one process: calls run at once, results still come as pending handles.

A result that could be touched early here would work on a laptop and fail on a cluster, so it raises here too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tutelage.config.cluster import MAIN
from tutelage.errors import ClusterError, PendingError
from tutelage.layout import Dispatch, Place, RoleBuilder, dispatch_of
from tutelage.transport.metering import CONTROLLER, TAKE, Measured, Meter
from tutelage.transport.pending import Unreadable


class Ready(Unreadable):
    """A finished result that must be gathered before it is read."""

    __slots__ = ("_label", "_value")

    def __init__(self, value: Any, label: str) -> None:
        self._value = value
        self._label = label

    def gather(self) -> Any:
        return self._value

    def adding(self, **columns: Any) -> Ready:
        """The batch with these columns, each of which may be pending."""
        return Ready(self._value.adding(**{name: resolved(column) for name, column in columns.items()}), self._label)

    def _touched(self, what: str) -> NoReturn:
        raise PendingError(
            f"{what} of the pending result of {self._label} was read before it was gathered",
            fix="call .gather() on it first, or pass the pending result itself to another role",
        )


def resolved(value: Any) -> Any:
    """A pending argument becomes its value; anything else is passed through."""
    return value.gather() if isinstance(value, Ready) else value


class LocalHandle:
    """A role's public methods, returning pending results; and `take_measured` (see `transport.metering`)."""

    def __init__(
        self,
        name: str,
        role: Any,
        on_call: Callable[[str, str, float], None],
        meter: Meter,
        measured: Callable[[str], Measured],
    ) -> None:
        self._name = name
        self._role = role
        self._on_call = on_call
        self._meter = meter
        self._measured = measured

    def __getattr__(self, method: str) -> Callable[..., Ready]:
        if method.startswith("_"):
            raise AttributeError(method)
        if method == TAKE:
            return lambda: Ready([self._measured(self._name)], f"{self._name}.{method}")
        target = getattr(self._role, method)

        def call(*args: Any, **kwargs: Any) -> Ready:
            start = time.perf_counter()
            given, named = [resolved(a) for a in args], {k: resolved(v) for k, v in kwargs.items()}
            each = dispatch_of(self._role, method) is Dispatch.EACH
            if each:  # one rank: its entry of every list, and a list with its reply
                given, named = [a[0] for a in given], {k: v[0] for k, v in named.items()}
            try:
                with self._meter.phase(self._name, method) as running:
                    value = target(*given, **named)
                    running.saw((value, *given))
            except Exception as error:
                error.add_note(f"in {self._name}.{method}")
                raise
            value = [value] if each else value
            self._on_call(self._name, method, time.perf_counter() - start)
            return Ready(value, f"{self._name}.{method}")

        return call


class LocalTransport:
    """Runs everything in this process; `seconds` sums the time of each (role, method).  place: of the builder."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place if place is not None else Place()
        self.seconds: dict[tuple[str, str], float] = {}
        self.busy = 0.0
        self.roles: dict[str, Any] = {}
        self.meter = Meter(device=self.place.device)
        self._lock = threading.Lock()

    def start(self, builder: RoleBuilder, roles: tuple[str, ...]) -> tuple[dict[str, LocalHandle], tuple[str, ...]]:
        """Handles of the roles, built here, and what the builder noted."""
        built = builder(roles, self.place)
        return {name: self.handle(name, role) for name, role in built.roles.items()}, built.notes

    def places(self) -> tuple[str, ...]:
        """This process goes without saying."""
        return ()

    def lost(self) -> tuple[str, ...]:
        """A process that is lost says nothing."""
        return ()

    def restart(self, pool: str, /) -> tuple[str, ...]:
        raise ClusterError(f"pool {pool} is this process", fix="resume the run from its last checkpoint")

    def attach(self, folder: Path) -> None:
        """Everything runs here."""

    def close(self) -> None:
        """Nothing is held."""

    def _took(self, name: str, method: str, seconds: float) -> None:
        with self._lock:  # scores may be computed in a thread of their own
            self.seconds[name, method] = self.seconds.get((name, method), 0.0) + seconds
            self.busy += seconds if name != CONTROLLER else 0.0

    def handle(self, name: str, role: Any) -> LocalHandle:
        self.roles[name] = role
        return LocalHandle(name, role, self._took, self.meter, self._measured)

    def _measured(self, name: str) -> Measured:
        return self.meter.take(name, self.roles)

    def put(self, value: Any) -> Ready:
        return Ready(value, "the controller")

    def call(self, function: Callable[..., Any], *args: Any, outputs: int = 1) -> tuple[Ready, ...]:
        """Controller mathematics; `outputs` says how many results the function returns."""
        name = getattr(function, "__name__", "function")
        start = time.perf_counter()
        value = function(*map(resolved, args))
        self._took(CONTROLLER, name, time.perf_counter() - start)
        values = (value,) if outputs == 1 else tuple(value)
        assert len(values) == outputs, f"{name} returned {len(values)} results, {outputs} were declared"
        return tuple(Ready(v, f"controller.{name}") for v in values)

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """The sums since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    def take_busy(self) -> dict[str, float]:
        """Seconds that the one pool worked on roles since the last call; empty where it did not."""
        busy, self.busy = self.busy, 0.0
        return {MAIN: busy} if busy else {}
