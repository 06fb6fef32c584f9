"""Which prompts a step learns from, so that none of those left over can become too stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A prompt that was sent off and is not learned from yet.

    order: its place in the data.  deadline: the last weight version that may learn from its rollouts.
    complete: all of its responses are there.
    """

    order: int
    deadline: int
    complete: bool


def choose(waiting: Sequence[Waiting], size: int, version: int) -> list[Waiting]:
    """`size` prompts for the step at `version`: complete ones overtake, as long as every other keeps its deadline.

    Sorted by deadline, the j-th prompt left over is learned from at version + 1 + j // size or later, so all are in
    time exactly when its deadline is no earlier (earliest deadline first is optimal, Jackson 1955).  The first f
    prompts are taken whether complete or not, then complete ones in order, with the smallest f for which that holds;
    where it holds for none, the `size` earliest are taken.  All are returned in the order of their deadlines.
    """
    ordered = sorted(waiting, key=lambda w: (w.deadline, w.order))
    size = min(size, len(ordered))
    for forced in range(size):
        first, rest = ordered[:forced], ordered[forced:]
        overtaking = [w for w in rest if w.complete][: size - forced]
        if len(overtaking) == size - forced:
            taken = {w.order for w in [*first, *overtaking]}
            if in_time([w for w in ordered if w.order not in taken], size, version + 1):
                return [*first, *overtaking]
    return ordered[:size]


def in_time(ordered: Sequence[Waiting], size: int, version: int) -> bool:
    """Whether steps of `size` prompts from `version` on reach every prompt by its deadline."""
    return all(waiting.deadline >= version + place // size for place, waiting in enumerate(ordered))
