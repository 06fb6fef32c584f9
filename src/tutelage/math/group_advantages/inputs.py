"""What an advantage estimator reads and returns, and how it is called.

Shapes: B sequences, T response tokens, K reward sources; b of the B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import RewardError, ShapeError
from tutelage.math.group_advantages.groups import Groups, group_statistics
from tutelage.math.masking import at_least_float32, require_matrix


@dataclass(frozen=True, eq=False)
class EstimatorInputs:
    """What an estimator may read.  Rows are responses; those of one prompt share a number in `group`, in any order.

    score         (B,) the reward of the whole response: weighted sum of the sources, and everything added to it.
    token_reward  (B, T) the same reward by token: its sum over the mask is score.
    group         (B,) integers.
    mask          (B, T) tokens that the policy produced.
    values        (B, K) what each reward source said, in its own units, and weights (K,) of their sum.
    shaping       (B,) what is in score besides the sources: penalties, per-token rewards, KL.
    baseline      (B,) the score of a greedy response to the same prompt, or None.
    old_logp, log_collision   (B, T) log p of the token and log sum_v p_v^2 of its distribution, or None.
    scale         group, batch or none: which standard deviation divides.   eps: added to it.
    gamma         discount per token.
    """

    score: Tensor
    token_reward: Tensor
    group: Tensor
    mask: Tensor
    values: Tensor
    weights: Tensor
    shaping: Tensor
    baseline: Tensor | None = None
    old_logp: Tensor | None = None
    log_collision: Tensor | None = None
    scale: str = "group"
    eps: float = 1e-4
    gamma: float = 1.0

    def select(self, index_B: Tensor) -> EstimatorInputs:
        """Rows `index_B`, in that order."""
        columns: dict[str, Any] = {
            f.name: value[index_B]
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor) and f.name != "weights"
        }
        return replace(self, **columns)

    def needed(self, name: str) -> Tensor:
        """An optional column.  Raises ShapeError where it is missing."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ShapeError(f"this estimator needs {name}, which was not computed", fix=f"compute {name} first")
        return value


Estimator = Callable[[EstimatorInputs], Tensor]


@dataclass(frozen=True, eq=False)
class Estimate:
    """advantage (B, T), 0 under the mask and in rows that do not count; counted (B,) bool: rows of the loss.

    scored (B,) bool: rows that have a score; groups: statistics of these rows alone, in their order.
    """

    advantage: Tensor
    counted: Tensor
    groups: Groups
    scored: Tensor


def estimate(inputs: EstimatorInputs, estimator: Estimator, scored_B: Tensor, *, grouped: bool) -> Estimate:
    """The advantages of an estimator.  A row without a score is in no statistic, has A = 0 and does not count.

    scored_B: (B,) bool.  grouped: a response alone in its group (of those with a score) has A = 0 and does not count.
    Raises RewardError for a score (of a scored row) or a result that is not finite, ShapeError for another shape.
    """
    _require_shapes(inputs, scored_B)
    kept_b = torch.nonzero(scored_B).squeeze(1)
    rows = _clean(inputs.select(kept_b))
    groups = group_statistics(rows.score, rows.group)
    found = estimator(rows) if len(kept_b) else torch.zeros_like(rows.score)
    if found.shape == rows.score.shape:
        found = found[:, None].expand_as(rows.mask)
    if found.shape != rows.mask.shape:
        raise ShapeError(
            f"the advantage estimator returned {tuple(found.shape)} for {tuple(rows.mask.shape)} tokens",
            fix="return (B,), or (B, T)",
        )
    found = at_least_float32(found.detach()).masked_fill(rows.mask == 0, 0.0)
    bad = int((~torch.isfinite(found)).sum())
    if bad:
        raise RewardError(f"the advantages of {bad} tokens are NaN or infinite", fix="look at the scores of this step")
    counts_b = groups.size >= 2 if grouped else torch.ones_like(groups.equal)
    advantage_BT = found.new_zeros(inputs.mask.shape)
    advantage_BT[kept_b] = torch.where(counts_b[:, None], found, 0.0)
    counted_B = torch.zeros_like(scored_B)
    counted_B[kept_b] = counts_b
    return Estimate(advantage_BT, counted_B, groups, scored_B)


def _require_shapes(inputs: EstimatorInputs, scored_B: Tensor) -> None:
    require_matrix(mask=inputs.mask)
    rows, tokens = inputs.mask.shape
    sources = len(inputs.weights)
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(("score", "group", "shaping", "baseline"), (rows,))
    wanted |= dict.fromkeys(("token_reward", "old_logp", "log_collision"), (rows, tokens))
    wanted["values"] = (rows, sources)
    for name, shape in wanted.items():
        column = getattr(inputs, name)
        if column is not None and tuple(column.shape) != shape:
            raise ShapeError(f"{name} has shape {tuple(column.shape)}", fix=f"pass {shape}, as the mask has it")
    if tuple(scored_B.shape) != (rows,):
        raise ShapeError(f"scored has shape {tuple(scored_B.shape)}", fix=f"pass one flag for each of {rows} rows")


def _clean(rows: EstimatorInputs) -> EstimatorInputs:
    """Detached, in float32 at least, and finite.  Raises RewardError."""
    floats: dict[str, Any] = {
        f.name: at_least_float32(value.detach())
        for f in fields(rows)
        if isinstance(value := getattr(rows, f.name), Tensor) and f.name not in ("group", "mask")
    }
    for name in ("score", "values", "shaping", "baseline"):
        if name in floats and not bool(torch.isfinite(floats[name]).all()):
            bad = int((~torch.isfinite(floats[name])).reshape(len(rows.score), -1).any(dim=1).sum())
            what = {"baseline": "scores of greedy responses", "shaping": "penalties"}.get(name, "scores")
            raise RewardError(
                f"{bad} of {len(rows.score)} {what} are NaN or infinite", fix="look at the reward function"
            )
    return replace(rows, **floats)
