"""Several reward sources, each with a weight.

Shapes: B sequences, K named scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tutelage.errors import RewardError
from tutelage.protocols import RewardSource
from tutelage.rewards.checks import require_scores
from tutelage.types import Rollout


class RewardMix:
    """total = sum over sources of weight * score. Names are the sources'; a second of the same name gets `_2`.

    Raises RewardError for no source, a number of weights that differs, and a weight that is not finite.
    """

    def __init__(self, sources: Sequence[RewardSource], weights: Sequence[float]) -> None:
        if not sources:
            raise RewardError(
                "there is no reward source", fix="set reward.model, or give reward.rules at least one rule"
            )
        if len(weights) != len(sources):
            raise RewardError(f"{len(weights)} weights for {len(sources)} reward sources", fix="give each its weight")
        for source, weight in zip(sources, weights, strict=True):
            if not math.isfinite(weight):
                raise RewardError(f"the weight of {source.name} is {weight}", fix="give it a finite weight")
        self.sources = tuple(sources)
        self.weights = tuple(float(w) for w in weights)
        self.names = _distinct([source.name for source in sources])

    def score(self, rollout: Rollout) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """score (B, K) in the sources' own units, total (B,), and the K names; float32 on the CPU.

        Raises RewardError naming source and row for a score that is not finite or a wrong count.
        """
        fix = "correct the reward source; a response that cannot be scored needs a score all the same"
        columns = [
            require_scores(source.score(rollout), rollout, f"reward source {name}", fix)
            for source, name in zip(self.sources, self.names, strict=True)
        ]
        score_BK = torch.stack(columns, dim=1)
        return score_BK, (score_BK.double() @ torch.tensor(self.weights, dtype=torch.float64)).float(), self.names


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    out: list[str] = []
    for name in names:
        unique, count = name, 1
        while unique in out:
            count += 1
            unique = f"{name}_{count}"
        out.append(unique)
    return tuple(out)
