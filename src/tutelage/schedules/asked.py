"""Prompts that were sent off, and the responses that have come back for them so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tutelage.errors import RolloutError
from tutelage.protocols import Pending
from tutelage.rollout.partial import Carried
from tutelage.schedules.saved import packed, unpacked
from tutelage.types import Prompts, Rollout


class Key(NamedTuple):
    """One response that was asked for: order, the place of its prompt in the data, and what names it elsewhere."""

    order: int
    step: int
    prompt_id: str
    sample: int


@dataclass(frozen=True)
class Call:
    """keys: the responses that were asked for, those begun earlier first.  result: a Rollout, or (Rollout, Carried)."""

    keys: tuple[Key, ...]
    result: Pending


@dataclass(frozen=True)
class Asked:
    """One prompt.  deadline: the last weight version that may learn from it.  parts: its finished responses so far."""

    prompt: Prompts
    order: int
    deadline: int
    parts: tuple[Rollout, ...] = ()

    @property
    def complete(self) -> bool:
        return sum(len(part) for part in self.parts) == self.prompt.n

    @property
    def oldest(self) -> int:
        """The oldest weights that a finished response holds a token of."""
        return min(int(part.weights_version.min()) for part in self.parts)

    def responses(self) -> tuple[Key, ...]:
        """What is asked for."""
        (name,) = self.prompt.ids
        return tuple(Key(self.order, self.prompt.step, name, sample) for sample in range(self.prompt.n))

    def rollout(self) -> Rollout:
        """All n responses in the order of their samples."""
        whole = self.parts[0] if len(self.parts) == 1 else Rollout.concat(self.parts)
        return whole.select(torch.argsort(whole.samples))

    def state(self) -> dict[str, Any]:
        parts = {f"{place:06d}": packed(part) for place, part in enumerate(self.parts)}
        return {"order": self.order, "deadline": self.deadline, "prompt": packed(self.prompt), "parts": parts}

    @classmethod
    def from_state(cls, saved: dict[str, Any]) -> Asked:
        parts = tuple(unpacked(part) for _, part in sorted(saved["parts"].items()))
        return cls(unpacked(saved["prompt"]), saved["order"], saved["deadline"], parts)


def sorted_out(
    call: Call, rollout: Rollout, carried: Carried
) -> tuple[list[tuple[int, Rollout]], list[tuple[Key, Any]]]:
    """What came back from a call: (order, finished responses of that prompt), and the samples to be carried on.

    Rollout rows name prompt and sample, not the step: where one prompt is on its way for two steps, its rows come in
    the order in which they were begun.  Raises RolloutError where responses are missing, or some were never asked for.
    """
    left: dict[tuple[str, int], list[Key]] = {}
    for key in call.keys:
        left.setdefault((key.prompt_id, key.sample), []).append(key)
    unfinished = []
    for sample in carried.samples:
        same = left.get((sample.prompt_id, sample.sample), [])
        place = next((i for i, key in enumerate(same) if key.step == sample.step), None)
        unfinished.append((same.pop(_known(place, sample.prompt_id)), sample))
    rows: dict[int, list[int]] = {}
    for row, name in enumerate(zip(rollout.prompt_ids, rollout.samples.tolist(), strict=True)):
        same = left.get(name, [])
        rows.setdefault(same.pop(_known(0 if same else None, name[0])).order, []).append(row)
    missing = [key for same in left.values() for key in same]
    if missing:
        raise RolloutError(
            f"{len(missing)} of {len(call.keys)} responses did not come back, such as one to {missing[0].prompt_id}",
            fix="a rollout engine returns every response it was asked for, or carries it on",
        )
    return [(order, rollout.select(torch.tensor(index))) for order, index in rows.items()], unfinished


def _known(place: int | None, prompt_id: str) -> int:
    if place is None:
        raise RolloutError(
            f"a response to prompt {prompt_id} came back that was not asked for",
            fix="a rollout engine returns each response once, under its own prompt and sample",
        )
    return place


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """One batch; its groups are numbered anew, one for each part."""
    lens = torch.tensor([len(r) for r in rollouts])
    return Rollout.concat(rollouts).adding(group=torch.repeat_interleave(torch.arange(len(rollouts)), lens))
