"""Losses of a process reward model on labelled steps, and one score of an answer from those of its steps.

Shapes: N steps of all answers, B answers.  (Lightman et al. 2023, arXiv:2305.20050; Uesato et al. 2022.)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, stack
from torch.nn.functional import binary_cross_entropy_with_logits

from tutelage.errors import ConfigError, ShapeError, closest
from tutelage.math.masking import at_least_float32, require_same_shape

_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda score_n: score_n.min(),
    "product": lambda score_n: score_n.prod(),
    "last": lambda score_n: score_n[-1],
    "mean": lambda score_n: score_n.mean(),
}
STEP_COMBINATIONS: tuple[str, ...] = tuple(_COMBINE)


def step_bce_loss(score_N: Tensor, label_N: Tensor) -> Tensor:
    """-(y log sigmoid(s) + (1 - y) log sigmoid(-s)), s the score at the last token of a step, y its label in [0, 1].

    A cross-entropy in nats, 0.693 at s = 0.  With y in {0, 1} it is the two-class cross-entropy of Lightman et al.
    (2023) with s the difference of the two logits; a fraction y is the share of continuations that succeed (Wang et al.
    2024, Math-Shepherd).  (N,) each; elementwise, not averaged.  Raises ShapeError; labels are the caller's to check.
    """
    require_same_shape(score=score_N, label=label_N)
    score_N = at_least_float32(score_N)
    return binary_cross_entropy_with_logits(score_N, label_N.to(score_N), reduction="none")


def step_mse_loss(score_N: Tensor, label_N: Tensor) -> Tensor:
    """(s - y)^2, s the score at the last token of a step, y its label in the score's own units.

    (N,) each; elementwise, not averaged.  Raises ShapeError.
    """
    require_same_shape(score=score_N, label=label_N)
    score_N = at_least_float32(score_N)
    return (score_N - label_N.to(score_N)).square()


def step_accuracy(score_N: Tensor, label_N: Tensor) -> Tensor:
    """correct_N: 1.0 where sigmoid(s) and the label are on one side of 1/2, else 0.0; s = 0 counts half.

    Without gradient.  Raises ShapeError.
    """
    require_same_shape(score=score_N, label=label_N)
    score_N = at_least_float32(score_N.detach())
    right_N = ((score_N > 0) == (label_N > 0.5)).to(score_N)
    return right_N.masked_fill(score_N == 0, 0.5)


def combined_steps(score_N: Tensor, steps_B: Tensor, kind: str) -> Tensor:
    """(B,) one score of each answer: the min, product, last or mean of the scores of its steps_B[b] steps.

    The minimum and the product are those of Lightman et al. (2023), for scores that are probabilities.
    Raises ConfigError for an unknown kind, ShapeError where counts do not add up to N or an answer has no step.
    """
    if kind not in STEP_COMBINATIONS:
        raise ConfigError(
            f"{kind!r} does not combine steps.{closest(kind, STEP_COMBINATIONS)}",
            fix=f"choose one of {', '.join(STEP_COMBINATIONS)}",
        )
    counts = steps_B.tolist()
    if sum(counts) != score_N.shape[0] or any(count < 1 for count in counts):
        raise ShapeError(f"{score_N.shape[0]} scores for answers of {counts[:8]} steps", fix="give every answer a step")
    if not counts:
        return at_least_float32(score_N)
    rows = at_least_float32(score_N).split(counts)
    return stack([_COMBINE[kind](row) for row in rows])
