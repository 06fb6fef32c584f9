"""Episodes in the reward of a run: their sums are shown as a source, their errors are the errors of the score.

Shapes: B episodes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tutelage.types import Rollout, Scores


class Mix(Protocol):
    """Several sources with weights (`rewards.mix`)."""

    sources: tuple[Any, ...]

    def score(self, rollout: Rollout) -> Scores: ...


class EpisodeReward:
    """The sum of an episode's turn rewards, in their own units.

    A run gives it the weight 0: the rewards are in `token_reward` already, at the turns that earned them, and would
    count twice.  So a run whose environments are its only reward has a total score of 0.
    """

    name = "environment"

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32."""
        return rollout.adding(score=None).rewarded()


class EpisodeErrors:
    """A mix whose rows that failed in their environment have no score: NaN, and `Scores.errors` says why."""

    def __init__(self, mix: Mix) -> None:
        self.mix = mix
        self.sources = mix.sources

    def score(self, rollout: Rollout) -> Scores:
        scores = self.mix.score(rollout)
        failed = rollout.episode_errors
        if failed is None or not any(failed):
            return scores
        known = scores.errors or ("",) * len(rollout)
        errors = tuple(
            f"environment {name}: {error}" if error else other
            for name, error, other in zip(rollout.environments or known, failed, known, strict=True)
        )
        failed_B = torch.tensor([bool(error) for error in failed], dtype=torch.bool)
        return replace(scores, total=scores.total.masked_fill(failed_B, math.nan), errors=errors)
