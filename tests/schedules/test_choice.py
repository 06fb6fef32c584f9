"""Which prompts a step takes: against every possible order of the steps that follow, tried out."""

from __future__ import annotations

import itertools
import random

import pytest

from tutelage.schedules.choice import Waiting, choose


def can_be_in_time(left: list[Waiting], size: int, version: int) -> bool:
    """Whether some way to cut what is left into steps of `size` keeps every deadline; by trying all first steps."""
    if any(w.deadline < version for w in left):
        return False
    if len(left) <= size:
        return True
    return any(
        can_be_in_time([w for w in left if w not in step], size, version + 1)
        for step in itertools.combinations(left, size)
    )


@pytest.mark.parametrize("seed", range(60))
def test_what_is_left_can_be_in_time_and_no_fewer_incomplete_ones_would_do(seed: int) -> None:
    draw = random.Random(seed)
    size, version = draw.choice([1, 2]), 5
    waiting = [Waiting(i, version + draw.randint(0, 3), draw.random() < 0.6) for i in range(draw.randint(size, 6))]
    taken = choose(waiting, size, version)
    assert len(taken) == len(set(taken)) == min(size, len(waiting))
    if not can_be_in_time(waiting, size, version):
        earliest = sorted(waiting, key=lambda w: (w.deadline, w.order))[:size]
        assert taken == earliest
        return
    assert can_be_in_time([w for w in waiting if w not in taken], size, version + 1)
    possible = [
        sum(not w.complete for w in step)
        for step in itertools.combinations(waiting, size)
        if can_be_in_time([w for w in waiting if w not in step], size, version + 1)
    ]
    assert min(possible) == sum(not w.complete for w in taken)
    if min(possible) == 0 and all(w.complete for w in waiting):
        assert [w.order for w in taken] == [w.order for w in sorted(waiting, key=lambda w: (w.deadline, w.order))][
            :size
        ]


def test_by_hand() -> None:
    late, due = Waiting(0, 9, False), Waiting(1, 5, False)
    ready = [Waiting(2, 9, True), Waiting(3, 9, True)]
    assert choose([late, *ready], 2, 5) == ready, "an incomplete one that can wait is overtaken"
    assert choose([due, *ready], 2, 5) == [due, ready[0]], "one that is due is not"
    behind = [Waiting(i, 6, False) for i in range(4, 7)]
    assert choose([*behind, *ready], 2, 5) == [behind[0], ready[0]], "three due in the next step of two: one goes now"
    assert choose([due], 2, 5) == [due], "fewer than a step: all"
