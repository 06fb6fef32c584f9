"""The actor's handle where another role generates: calls go to either, publication involves both."""

from __future__ import annotations

from typing import Any, NoReturn

from tutelage.errors import PendingError
from tutelage.transport.pending import Unreadable


class Both(Unreadable):
    """Two results that belong together: gathered together, the first one's errors first."""

    __slots__ = ("_results",)

    def __init__(self, *results: Any) -> None:
        self._results = results

    def gather(self) -> list[Any]:
        return [result.gather() for result in self._results]

    def _touched(self, what: str) -> NoReturn:
        raise PendingError(f"{what} of a pending publication was read", fix="call .gather() on it first")


class RoutedActor:
    """generate goes to the generator, publish moves the actor's weights there, everything else is the actor's.

    wire  weights go over a group of their own, from one rank of the actor to all engines at the same time; else they
          travel once through the transport's own store.
    """

    def __init__(self, actor: Any, generator: Any, *, wire: bool) -> None:
        self._actor = actor
        self._generator = generator
        self._wire = wire

    def __getattr__(self, method: str) -> Any:
        return getattr(self._actor, method)

    def connect(self, generators: int) -> None:
        """Open the wire: once, before the first publication."""
        if not self._wire:
            return
        members = 1 + generators * self._generator.receivers().gather()
        address = self._actor.open_publication(members).gather()
        Both(self._actor.connect(), self._generator.join(address, members)).gather()

    def generate(self, prompts: Any) -> Any:
        return self._generator.generate(prompts)

    def generate_partial(self, prompts: Any, carried: Any, budget_tokens: Any) -> Any:
        return self._generator.generate_partial(prompts, carried, budget_tokens)

    def publish(self, version: int) -> Any:
        """Pending: rollouts asked for later come from these weights."""
        if self._wire:
            return Both(self._actor.send_weights(), self._generator.receive(version))
        return self._generator.load_weights(self._actor.whole_weights(), version)
