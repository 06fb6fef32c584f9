"""The transport of one process: calls run at once, results still come as pending handles.

A result that could be touched early here would work on a laptop and fail on a cluster, so it raises here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

from tutelage.errors import PendingError
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
    """A role's public methods, returning pending results."""

    def __init__(self, name: str, role: Any, on_call: Callable[[str, str, float], None]) -> None:
        self._name = name
        self._role = role
        self._on_call = on_call

    def __getattr__(self, method: str) -> Callable[..., Ready]:
        if method.startswith("_"):
            raise AttributeError(method)
        target = getattr(self._role, method)

        def call(*args: Any, **kwargs: Any) -> Ready:
            start = time.perf_counter()
            try:
                value = target(*map(resolved, args), **{k: resolved(v) for k, v in kwargs.items()})
            except Exception as error:
                error.add_note(f"in {self._name}.{method}")
                raise
            self._on_call(self._name, method, time.perf_counter() - start)
            return Ready(value, f"{self._name}.{method}")

        return call


class LocalTransport:
    """Runs everything in this process; `seconds` sums the time of each (role, method)."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = {}

    def _took(self, name: str, method: str, seconds: float) -> None:
        self.seconds[name, method] = self.seconds.get((name, method), 0.0) + seconds

    def handle(self, name: str, role: Any) -> LocalHandle:
        return LocalHandle(name, role, self._took)

    def put(self, value: Any) -> Ready:
        return Ready(value, "the controller")

    def call(self, function: Callable[..., Any], *args: Any, outputs: int = 1) -> tuple[Ready, ...]:
        """Controller mathematics; `outputs` says how many results the function returns."""
        name = getattr(function, "__name__", "function")
        start = time.perf_counter()
        value = function(*map(resolved, args))
        self._took("controller", name, time.perf_counter() - start)
        values = (value,) if outputs == 1 else tuple(value)
        assert len(values) == outputs, f"{name} returned {len(values)} results, {outputs} were declared"
        return tuple(Ready(v, f"controller.{name}") for v in values)

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """The sums since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken
