"""Several reward models as one reward source, and how far they disagree as another.

Shapes: M members, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutelage.errors import RewardError
from tutelage.math.reward_loss import combined_scores
from tutelage.protocols import RewardSource
from tutelage.types import Rollout


class EnsembleSource:
    """Scores rollouts with every member and combines the scores (`math.reward_loss:combined_scores`).

    Raises RewardError for fewer than two members.
    """

    def __init__(
        self,
        members: Sequence[RewardSource],
        combine: str = "mean",
        variance_weight: float = 0.0,
        name: str = "reward_ensemble",
    ) -> None:
        if len(members) < 2:
            raise RewardError(
                f"the ensemble has {len(members)} reward model{'s' * (len(members) != 1)}",
                fix="name two or more in reward.ensemble, or one in reward.model",
            )
        self.members = tuple(members)
        self.combine = combine
        self.variance_weight = variance_weight
        self.name = name
        self._latest: tuple[Rollout, Tensor] | None = None

    @property
    def cut(self) -> int:
        """Inputs that lost their start, over all members."""
        return sum(getattr(member, "cut", 0) for member in self.members)

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32.  Errors are the members' own."""
        return self._scored(rollout)[0]

    def disagreement(self, rollout: Rollout) -> Tensor:
        """(B,) standard deviation of the members' scores; of the rollout that was just scored without scoring again."""
        latest, self._latest = self._latest, None
        if latest is not None and latest[0] is rollout:
            return latest[1]
        return self._scored(rollout)[1]

    def _scored(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        score_MB = torch.stack([member.score(rollout) for member in self.members])
        score_B, spread_B = combined_scores(score_MB, self.combine, self.variance_weight)
        self._latest = (rollout, spread_B)
        return score_B, spread_B


class EnsembleDisagreement:
    """The standard deviation of an ensemble's scores as a source of its own: with weight 0, a metric.

    It belongs behind its ensemble in the list of sources.
    """

    def __init__(self, ensemble: EnsembleSource) -> None:
        self.ensemble = ensemble
        self.name = f"{ensemble.name}_std"

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32."""
        return self.ensemble.disagreement(rollout)
