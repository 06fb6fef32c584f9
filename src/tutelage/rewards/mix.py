"""Several reward sources, each with a weight.

Shapes: B sequences, K named scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from tutelage.errors import RewardError
from tutelage.protocols import RewardSource
from tutelage.rewards.checks import require_scores
from tutelage.types import Rollout, Scores

OnError = Literal["stop", "skip"]


@runtime_checkable
class Attempting(Protocol):
    """A source that can say of single responses why they have no score (`rewards.rules`)."""

    def attempt(self, rollout: Rollout) -> tuple[Tensor, tuple[str, ...]]:
        """(B,) scores, and B reasons: "" where there is a score."""
        ...


class RewardMix:
    """total = sum over sources of weight * score. Names are the sources'; a second of the same name gets `_2`.

    on_error  stop: a response without a score raises RewardError.  skip: its scores are NaN and `Scores.errors` says
              why, where the source is a rule; a reward model that returns NaN has broken weights and still raises.
    Raises RewardError for no source, a number of weights that differs, and a weight that is not finite.
    """

    def __init__(self, sources: Sequence[RewardSource], weights: Sequence[float], on_error: OnError = "stop") -> None:
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
        self.on_error = on_error

    def score(self, rollout: Rollout) -> Scores:
        """values (B, K) in the sources' own units and total (B,), float32 on the CPU; with names, weights and errors.

        `errors` is None under stop, else one entry per response.  Raises RewardError naming source and row.
        """
        columns, reasons = [], [""] * len(rollout)
        for source, name in zip(self.sources, self.names, strict=True):
            values_B, said = self._column(source, name, rollout)
            columns.append(values_B)
            reasons = [first or second for first, second in zip(reasons, said, strict=True)]
        values_BK = torch.stack(columns, dim=1)
        total_B = (values_BK.double() @ torch.tensor(self.weights, dtype=torch.float64)).float()
        errors = None
        if self.on_error == "skip":
            errors = tuple(reasons)
            total_B = total_B.masked_fill(torch.tensor([bool(error) for error in errors], dtype=torch.bool), math.nan)
        return Scores(values_BK, total_B, self.names, self.weights, errors)

    def _column(self, source: RewardSource, name: str, rollout: Rollout) -> tuple[Tensor, Sequence[str]]:
        fix = "correct the reward source; a response that cannot be scored needs a score all the same"
        if self.on_error == "skip" and isinstance(source, Attempting):
            values_B, reasons = source.attempt(rollout)
            bad_B = torch.tensor([bool(reason) for reason in reasons], dtype=torch.bool)
            require_scores(values_B.masked_fill(bad_B, 0.0), rollout, f"reward source {name}", fix)
            return values_B, reasons
        values_B = require_scores(source.score(rollout), rollout, f"reward source {name}", fix)
        return values_B, [""] * len(rollout)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    out: list[str] = []
    for name in names:
        unique, count = name, 1
        while unique in out:
            count += 1
            unique = f"{name}_{count}"
        out.append(unique)
    return tuple(out)
