"""Learning from preferences between fresh responses: which two are compared, and what XPO and Nash-MD add to DPO.

Shapes: B responses, P pairs, R response tokens.  Logprobs are in nats.  The losses are elementwise: nothing is averaged
here.  The pairwise losses themselves are those of `math.preference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError, closest
from tutelage.math.masking import at_least_float32, require_same_shape

Preference = Callable[[Tensor, Tensor], Tensor]
"""(scores of the one side (P,), of the other (P,)) -> (P,) probability that the one side is preferred."""


# ---- which responses are compared ----


@dataclass(frozen=True)
class Compared:
    """best, worst (P,) int64 rows of the batch, one of each per group, never the same row.

    margin (P,): score of the best - score of the worst, at least 0.  0: no preference (a tie, or too few scores).
    unscored (P,) bool: fewer than two responses of the group have a score; the margin says 0.
    """

    best: Tensor
    worst: Tensor
    margin: Tensor
    unscored: Tensor


def best_and_worst(score_B: Tensor, group_B: Tensor, valid_B: Tensor | None = None) -> Compared:
    """The highest and the lowest score of every group, P = number of groups, in the order of the group numbers.

    Among equals the best is the first row and the worst the last one, so that a group whose scores are all equal still
    gives two rows, with margin 0.  Responses whose valid is False have no score: they are neither best nor worst where
    two others have one.  What their score says is never read.

    score_B float, group_B int64, valid_B bool: (B,).  No gradient.
    Raises ShapeError when shapes differ, for no response at all, and for a group of one response.
    """
    require_same_shape(score=score_B, group=group_B, valid=valid_B)
    if not len(score_B):
        raise ShapeError("there is no response to compare", fix="give at least one group of two")
    valid_B = torch.ones_like(group_B, dtype=torch.bool) if valid_B is None else valid_B
    names_P, at_B, size_P = torch.unique(group_B, sorted=True, return_inverse=True, return_counts=True)
    if int(size_P.min()) < 2:
        raise ShapeError(
            f"group {int(names_P[size_P.argmin()])} has one response, which can be compared with no other",
            fix="sample at least 2 responses to each prompt",
        )
    score_B = at_least_float32(score_B.detach())
    filled_B, unscored_P = _filled(score_B, at_B, valid_B, len(size_P))
    order_B = torch.argsort(filled_B, descending=True, stable=True)
    order_B = order_B[torch.argsort(at_B[order_B], stable=True)]
    last_P = size_P.cumsum(0) - 1
    best_P, worst_P = order_B[last_P - size_P + 1], order_B[last_P]
    margin_P = torch.where(unscored_P, 0.0, filled_B[best_P] - filled_B[worst_P])
    return Compared(best_P, worst_P, margin_P, unscored_P)


def _filled(score_B: Tensor, at_B: Tensor, valid_B: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Scores with the middle of its group's range where there is none, and which groups have fewer than two."""
    counted_P = torch.zeros(groups, dtype=torch.int64, device=score_B.device).index_add(0, at_B, valid_B.long())
    unscored_P = counted_P < 2
    high_P = score_B.new_full((groups,), -math.inf).scatter_reduce(
        0, at_B, score_B.masked_fill(~valid_B, -math.inf), "amax"
    )
    low_P = score_B.new_full((groups,), math.inf).scatter_reduce(
        0, at_B, score_B.masked_fill(~valid_B, math.inf), "amin"
    )
    middle_P = torch.where(unscored_P, 0.0, low_P + 0.5 * (high_P - low_P))
    keep_B = valid_B & ~unscored_P[at_B]
    return torch.where(keep_B, score_B, middle_P[at_B]), unscored_P


# ---- XPO ----


def xpo_loss(preference_loss_P: Tensor, explored_logp_P: Tensor, counted_P: Tensor, alpha: float) -> Tensor:
    """counted * l + alpha log pi(y~|x): exploratory preference optimisation (Xie et al. 2024, arXiv:2405.21046).

    preference_loss_P  l, the pairwise loss of the policy's response y against the reference's response y~.
    explored_logp_P    log pi(y~|x), summed over tokens: minimising it moves the policy away from what the reference
                       says already, which is the optimism of algorithm 1.  Its sum is over all pairs, ties too.
    counted_P          bool: the pair has a preference.

    (P,) each; alpha in loss per nat.  Raises ShapeError, ConfigError for alpha < 0.
    """
    require_same_shape(preference_loss=preference_loss_P, explored_logp=explored_logp_P, counted=counted_P)
    if not alpha >= 0.0:
        raise ConfigError(f"alpha of XPO is {alpha}", fix="use 0 or a small number above it; 1e-5 is usual")
    return torch.where(counted_P, preference_loss_P, 0.0) + alpha * at_least_float32(explored_logp_P)


# ---- Nash-MD ----


def sigmoid_preference(score_P: Tensor, rival_score_P: Tensor) -> Tensor:
    """P(y > y') = sigmoid(s(y) - s(y')): the Bradley-Terry model of a reward model's scores.  (P,); ShapeError."""
    require_same_shape(score=score_P, rival_score=rival_score_P)
    return torch.sigmoid(at_least_float32(score_P) - at_least_float32(rival_score_P))


def win_preference(score_P: Tensor, rival_score_P: Tensor) -> Tensor:
    """1 where s(y) > s(y'), 0 where it is less, 1/2 for a tie: a judge that is sure.  (P,); raises ShapeError."""
    require_same_shape(score=score_P, rival_score=rival_score_P)
    return 0.5 + 0.5 * torch.sign(at_least_float32(score_P) - at_least_float32(rival_score_P))


PREFERENCES: dict[str, Preference] = {"sigmoid": sigmoid_preference, "win": win_preference}


def preference_of(kind: str) -> Preference:
    """The preference model of that name.  Raises ConfigError for an unknown one."""
    if kind not in PREFERENCES:
        raise ConfigError(
            f"{kind!r} is not a preference model.{closest(kind, PREFERENCES)}",
            fix=f"choose one of {', '.join(PREFERENCES)}, or name a function of yours as module:function",
        )
    return PREFERENCES[kind]


def nash_md_loss(logp_R: Tensor, advantage_R: Tensor, log_ratio_R: Tensor, beta: float) -> Tensor:
    """-(A - beta d) log pi, elementwise: Nash-MD-PG (Munos et al. 2023, arXiv:2312.00886, section 7).

    The paper ascends  E[grad log pi(y|x) (P(y > y') - 1/2 - tau log(pi(y|x) / mu(y|x)))],  y ~ pi, y' ~ the geometric
    mixture.  The sum of this loss over the tokens of a response has that gradient, with its sign turned, where on every
    token

        advantage_R  A = P(y > y') - 1/2 of its response; 1/2 is a control variate, in expectation it adds nothing.
        log_ratio_R  d = log pi(y|x) - log mu(y|x) of its whole response, mu the reference.  No gradient goes into it.

    With d of the token alone the KL of later tokens is left out of a token's credit, as TRL does.
    The value means nothing by itself.  Any shape, all equal; beta is the paper's tau.
    Raises ShapeError, ConfigError for beta < 0.
    """
    require_same_shape(logp=logp_R, advantage=advantage_R, log_ratio=log_ratio_R)
    if not beta >= 0.0:
        raise ConfigError(f"beta of Nash-MD is {beta}", fix="use 0 or a number above it; 0.1 is usual")
    weight_R = advantage_R.detach() - beta * log_ratio_R.detach()
    return -weight_R * at_least_float32(logp_R)


def mixed_logits(logits: Tensor, ref_logits: Tensor, coef: float) -> Tensor:
    """(1 - coef) logits + coef ref_logits: of the geometric mixture pi^(1 - coef) ref^coef, up to its normalisation.

    softmax(mixed / T) is proportional to pi_T^(1 - coef) ref_T^coef, with both models at temperature T (Munos et al.
    2023, section 7: the mixture is taken token by token, which is not that of whole responses).  coef 0 is the policy,
    1 the reference; there the other side is not read.  Float32 at least; any shape.
    Raises ShapeError when shapes differ, ConfigError unless 0 <= coef <= 1.
    """
    require_same_shape(logits=logits, ref_logits=ref_logits)
    if not 0.0 <= coef <= 1.0:
        raise ConfigError(f"the mixture coefficient is {coef}", fix="use a number from 0 (policy) to 1 (reference)")
    if coef in (0.0, 1.0):
        return at_least_float32(ref_logits if coef else logits)
    return (1.0 - coef) * at_least_float32(logits) + coef * at_least_float32(ref_logits)
