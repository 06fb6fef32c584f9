"""The reward: named scores of finished rollouts and their weighted total."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tutelage.types import Rollout, Scores


class Mix(Protocol):
    """Several sources with weights (`rewards.mix`)."""

    def score(self, rollout: Rollout) -> tuple[Tensor, Tensor, tuple[str, ...]]: ...


class Reward:
    def __init__(self, mix: Mix) -> None:
        self.mix = mix

    def score(self, rollout: Rollout) -> Scores:
        values_BK, total_B, names = self.mix.score(rollout)
        return Scores(values_BK, total_B, names)
