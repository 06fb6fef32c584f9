"""A generation in parts: groups handed out as they end, and given up when nobody needs the rest."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tutelage.errors import RolloutError
from tutelage.types import Prompts, Rollout


@runtime_checkable
class Streaming(Protocol):
    """A rollout engine that hands out groups as they end (`rollout.inprocess.engine`)."""

    def stream(self, prompts: Prompts) -> Iterator[Rollout]: ...


@dataclass
class Parts:
    """One generation at a time."""

    _open: Iterator[Rollout] | None = None

    def begin(self, engine: object, prompts: Prompts) -> None:
        """What an error left open is given up.  Raises RolloutError for an engine without stream."""
        self.close()
        if not isinstance(engine, Streaming):
            raise RolloutError(
                f"{type(engine).__name__} generates whole batches only", fix="set schedule.stream to false"
            )
        self._open = engine.stream(prompts)

    def next(self) -> Rollout | None:
        """All responses to one prompt; None: there are no more.  Raises RolloutError where none was begun."""
        if self._open is None:
            raise RolloutError("no generation in parts is open", fix="call begin_parts first")
        return next(self._open, None)

    def close(self) -> None:
        """Give up what still decodes; its pages are free from here on."""
        stream, self._open = self._open, None
        if isinstance(stream, Generator):
            stream.close()
