"""Roles that take a known amount of memory in one of their methods; processes of a Ray pool import them from here.

Shapes: B sequences, R flat response tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tutelage.layout import Built, Dispatch, Place
from tutelage.types import Ragged, Rollout

SIZE = 64_000_000
"""Bytes: over the size from which the C library gives memory back to the system at once."""
SLACK = 8_000_000
"""Bytes: what else a process may take or give back meanwhile."""


def filled(size: int = SIZE) -> torch.Tensor:
    """That many bytes, each written to, so that they are resident."""
    return torch.empty(size, dtype=torch.uint8).fill_(1)


class Hungry:
    """only: the one rank that takes memory; None: every rank."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {"lengths": Dispatch.ROWS}

    def __init__(self, rank: int = 0, only: int | None = None) -> None:
        self.rank, self.only = rank, only

    def eat(self, size: int = SIZE) -> int:
        return int(filled(size)[-1]) if self.only in (None, self.rank) else 0

    def fast(self) -> None:
        pass

    def choke(self) -> None:
        filled()
        raise KeyError("inside")

    def lengths(self, rollout: Rollout) -> Ragged:
        return rollout.sequences.responses()


def hungry(names: tuple[str, ...], place: Place) -> Built:
    """In a pool only rank 1 takes memory."""
    roles: dict[str, Any] = {name: Hungry(place.rank, only=1 if place.world > 1 else None) for name in names}
    return Built(roles)
