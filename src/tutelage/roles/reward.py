"""The reward: named scores of finished rollouts and their weighted total."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from tutelage.layout import Dispatch
from tutelage.types import Rollout, Scores

MOST_ERRORS = 1000
"""Responses without a score that a rank remembers between two calls of `take_errors`."""


class Mix(Protocol):
    """Several sources with weights (`rewards.mix`)."""

    sources: tuple[Any, ...]

    def score(self, rollout: Rollout) -> Scores: ...


class Reward:
    """Scores on finished text or tokens."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {
        "score": Dispatch.ROWS,
        "cut_inputs": Dispatch.EACH,
        "take_errors": Dispatch.EACH,
    }

    def __init__(self, mix: Mix) -> None:
        self.mix = mix
        self.errors: list[dict[str, Any]] = []

    def cut_inputs(self) -> dict[str, int]:
        """How many inputs of each reward model were over its context and lost their start, of those that were cut."""
        return {source.name: source.cut for source in self.mix.sources if getattr(source, "cut", 0)}

    def score(self, rollout: Rollout) -> Scores:
        """Responses without a score are remembered for `take_errors`, the first 1,000 of them."""
        scores = self.mix.score(rollout)
        room = MOST_ERRORS - len(self.errors)
        self.errors += unscored(rollout, scores)[: max(room, 0)]
        return scores

    def forget_errors(self, dropped: list[tuple[str, int]]) -> None:
        """Of these responses, by prompt id and sample: nobody keeps them."""
        names = set(dropped)
        self.errors = [error for error in self.errors if (error["id"], error["sample"]) not in names]

    def take_errors(self) -> list[dict[str, Any]]:
        """The responses without a score since the last call, with their prompts and the reasons."""
        taken, self.errors = self.errors, []
        return taken


def unscored(rollout: Rollout, scores: Scores) -> list[dict[str, Any]]:
    """A record of every response that has no score: id, sample, messages, response, truth and error."""
    return [
        {
            "id": rollout.prompt_ids[row],
            "sample": int(rollout.samples[row]),
            "messages": list(rollout.messages[row]),
            "response": rollout.texts[row],
            "truth": rollout.truths[row],
            "error": error,
        }
        for row, error in enumerate(scores.errors or ())
        if error
    ]
