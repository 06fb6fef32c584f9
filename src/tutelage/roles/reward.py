"""The reward: named scores of finished rollouts and their weighted total."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from tutelage.layout import Dispatch
from tutelage.types import Rollout, Scores


class Mix(Protocol):
    """Several sources with weights (`rewards.mix`)."""

    sources: tuple[Any, ...]

    def score(self, rollout: Rollout) -> tuple[Tensor, Tensor, tuple[str, ...]]: ...


class Reward:
    """Scores on finished text or tokens."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {"score": Dispatch.ROWS, "cut_inputs": Dispatch.EACH}

    def __init__(self, mix: Mix) -> None:
        self.mix = mix

    def cut_inputs(self) -> dict[str, int]:
        """How many inputs of each reward model were over its context and lost their start, of those that were cut."""
        return {source.name: source.cut for source in self.mix.sources if getattr(source, "cut", 0)}

    def score(self, rollout: Rollout) -> Scores:
        values_BK, total_B, names = self.mix.score(rollout)
        return Scores(values_BK, total_B, names)
