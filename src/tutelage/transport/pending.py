"""What no pending result answers, whatever the transport: anything that would look at its value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn


class Unreadable(ABC):
    """Attributes, length, truth, elements, comparison and hash go to `_touched`, which raises PendingError."""

    __slots__ = ()

    @abstractmethod
    def _touched(self, what: str) -> NoReturn:
        """Raise PendingError; what: the part of the value that was looked at."""

    def __getattr__(self, name: str) -> NoReturn:
        self._touched(f".{name}")

    def __len__(self) -> int:
        self._touched("the length")

    def __bool__(self) -> bool:
        self._touched("the truth value")

    def __iter__(self) -> NoReturn:
        self._touched("an element")

    def __getitem__(self, key: object) -> NoReturn:
        self._touched(f"[{key!r}]")

    def __eq__(self, other: object) -> bool:
        self._touched("equality")

    def __hash__(self) -> int:
        self._touched("the hash")
