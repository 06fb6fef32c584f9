"""The transport on which nothing runs: an algorithm's own file, executed on symbols, leaves its data flow behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tutelage.errors import PendingError
from tutelage.layout import RoleBuilder
from tutelage.transport.pending import Unreadable


@dataclass(frozen=True)
class Node:
    """One call: which role and method, and the nodes whose results it reads."""

    id: int
    role: str
    method: str
    inputs: tuple[int, ...]


class Recorded(Unreadable):
    """A symbol for a result; it can be passed on, extended and cut, but holds no data."""

    def __init__(self, transport: RecordingTransport, sources: frozenset[int]) -> None:
        self._transport = transport
        self._sources = sources

    def gather(self) -> Recorded:
        return self

    def adding(self, **columns: Any) -> Recorded:
        return Recorded(self._transport, self._sources.union(*(sources_of(c) for c in columns.values())))

    def minibatches(self, epochs: int, count: int, permutation: object) -> Iterator[Recorded]:
        """The declared expected count: a real batch yields exactly these."""
        for _ in range(epochs * count):
            yield self

    def _touched(self, what: str) -> NoReturn:
        raise PendingError(
            f"{what} of the recorded result was read, but recording holds no data",
            fix="move data-dependent work into `advantages`, which runs as one controller node",
        )


def sources_of(value: Any) -> frozenset[int]:
    return value._sources if isinstance(value, Recorded) else frozenset()


class RecordedHandle:
    """Records each call of a role's methods; a method the role does not have is refused."""

    def __init__(self, transport: RecordingTransport, name: str, role: Any) -> None:
        self._transport = transport
        self._name = name
        self._role = role

    def __getattr__(self, method: str) -> Callable[..., Recorded]:
        if method.startswith("_") or not hasattr(self._role, method):
            raise AttributeError(f"the {self._name} role has no method {method}")

        def call(*args: Any, **kwargs: Any) -> Recorded:
            return self._transport.node(self._name, method, (*args, *kwargs.values()))

        return call


class RecordingTransport:
    """Collects nodes in the order they are called.

    classes: of the roles that `start` gives handles of; their method names are all that is used.
    """

    def __init__(self, classes: Mapping[str, Any] | None = None) -> None:
        self.classes = classes or {}
        self.nodes: list[Node] = []

    def start(self, builder: RoleBuilder, roles: tuple[str, ...]) -> tuple[dict[str, RecordedHandle], tuple[str, ...]]:
        """Handles of the roles' classes; the builder is not called, since nothing runs."""
        return {name: self.handle(name, self.classes[name]) for name in roles}, ()

    def places(self) -> tuple[str, ...]:
        """Nothing runs anywhere."""
        return ()

    def lost(self) -> tuple[str, ...]:
        """Nothing can be lost."""
        return ()

    def restart(self, pool: str, /) -> tuple[str, ...]:
        raise PendingError(f"pool {pool} is recorded, it never ran", fix="run the recipe on a transport that runs it")

    def attach(self, folder: Path) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing was started."""

    def node(self, role: str, method: str, arguments: tuple[Any, ...]) -> Recorded:
        inputs = frozenset[int]().union(*(sources_of(a) for a in arguments))
        self.nodes.append(Node(len(self.nodes), role, method, tuple(sorted(inputs))))
        return Recorded(self, frozenset([self.nodes[-1].id]))

    def handle(self, name: str, role: Any) -> RecordedHandle:
        """`role` may be a class: only its method names are used."""
        return RecordedHandle(self, name, role)

    def put(self, value: Any) -> Recorded:
        return Recorded(self, frozenset())

    def call(self, function: Callable[..., Any], *args: Any, outputs: int = 1) -> tuple[Recorded, ...]:
        node = self.node("controller", getattr(function, "__name__", "function"), args)
        return (node,) * outputs

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """Nothing ran, so nothing took any time."""
        return {}

    def take_busy(self) -> dict[str, float]:
        """Nothing ran, so no pool was busy."""
        return {}
