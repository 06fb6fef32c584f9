"""Metrics that aggregate exactly, and what a model computed.   Shapes: B sequences, R flat response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Stat:
    """A metric as a sum and the weight it is divided by, so that it aggregates exactly over micro-batches and ranks."""

    total: float
    weight: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Stat:
        """Sum and count of the entries whose mask is set (all without a mask); values under mask 0 are never read."""
        values = values.detach().double()
        if mask is None:
            return cls(float(values.sum()), float(values.numel()))
        return cls(float(values[mask.bool()].sum()), float(mask.sum()))

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else float("nan")

    def plus(self, other: Stat) -> Stat:
        return Stat(self.total + other.total, self.weight + other.weight)


Stats = dict[str, Stat]


def merge_stats(parts: Sequence[Stats]) -> Stats:
    """Sums of sums: the order and the cut of the parts do not matter."""
    out: Stats = {}
    for part in parts:
        for name, stat in part.items():
            out[name] = out[name].plus(stat) if name in out else stat
    return out


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model computed for some items; an engine fills what a loss asks for.

    logp, entropy  (R,) over response tokens.   value (R,) before each response token.
    score (sequences,) one scalar per sequence, read at its last real token.
    token_score     (R,) a reward model's scalar at each response token, with the token itself read.
    log_collision   (R,) log sum_v p_v^2, without gradient.
    candidate_logp  (R, C) logprobs of the tokens in the batch's `candidate_ids`.
    """

    logp: Tensor | None = None
    entropy: Tensor | None = None
    value: Tensor | None = None
    score: Tensor | None = None
    token_score: Tensor | None = None
    log_collision: Tensor | None = None
    candidate_logp: Tensor | None = None
