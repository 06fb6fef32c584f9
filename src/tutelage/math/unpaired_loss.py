"""Losses on single answers that are desirable or not, from log ratios of whole answers. Shapes: B answers.

Log ratios are log pi(y | x) - log ref(y | x), summed over the trained tokens of an answer, in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tutelage.errors import ConfigError
from tutelage.math.masking import at_least_float32, require_same_shape
from tutelage.math.stats import average_ranks


@dataclass(frozen=True)
class UnpairedTerms:
    """Both (B,).  Only `loss` carries gradient.  reward: the implicit reward beta log(pi / ref), in nats times beta."""

    loss: Tensor
    reward: Tensor


def kto_reference_point(mismatched_logratio_B: Tensor) -> Tensor:
    """z0 = max(0, mean over b of log pi(y'_b | x_b) - log ref(y'_b | x_b)): a scalar without gradient, in nats.

    y'_b is an answer that was given to another prompt than x_b.  The mean estimates KL(pi || ref); a KL is never
    negative, so the estimate is clamped (Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1).  B is the whole
    mini-batch.
    """
    return at_least_float32(mismatched_logratio_B.detach()).mean().clamp(min=0.0)


def kto_loss(
    logratio_B: Tensor,
    desirable_B: Tensor,
    reference_point: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> UnpairedTerms:
    """lambda_D (1 - sigmoid(beta (r - z0))) where desirable, lambda_U (1 - sigmoid(beta (z0 - r))) elsewhere.

    r the log ratio, z0 from `kto_reference_point` (Ethayarajh et al. 2024, section 4.1).  With pi = ref every answer
    has the loss lambda / 2.  The reference point gets no gradient.

    (B,) each, desirable bool; elementwise, not averaged.
    Raises ShapeError when shapes differ, ConfigError unless beta > 0 and the weights are >= 0.
    """
    sign_B, scaled_B = _signed(logratio_B, desirable_B, beta)
    weight_B = _weights(desirable_B, desirable_weight, undesirable_weight, scaled_B)
    loss_B = weight_B * torch.sigmoid(-sign_B * (scaled_B - beta * reference_point.detach().to(scaled_B)))
    return UnpairedTerms(loss_B, scaled_B.detach())


def apo_zero_unpaired_loss(
    logratio_B: Tensor,
    desirable_B: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> UnpairedTerms:
    """lambda_D (1 - sigmoid(beta r)) where desirable, lambda_U sigmoid(beta r) elsewhere; r the log ratio.

    APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7) on answers without a pair: the reference point is
    fixed at 0, so desirable answers become likelier and undesirable ones less likely than under the reference.

    Shapes and errors as `kto_loss`.
    """
    zero = torch.zeros((), dtype=torch.float64)
    return kto_loss(logratio_B, desirable_B, zero, beta, desirable_weight, undesirable_weight)


def bco_loss(logratio_B: Tensor, desirable_B: Tensor, shift_B: Tensor, beta: float) -> UnpairedTerms:
    """-log sigmoid(beta r - delta) where desirable, -log sigmoid(-(beta r - delta)) elsewhere; r the log ratio.

    A binary classifier whose logit is the implicit reward less the reward shift delta (Jung et al. 2024,
    arXiv:2404.04656).  With pi = ref and delta = 0 every answer has the loss log 2.  delta gets no gradient.

    (B,) each, desirable bool; elementwise, not averaged.  Raises ShapeError when shapes differ, ConfigError for beta.
    """
    require_same_shape(logratio=logratio_B, shift=shift_B)
    sign_B, scaled_B = _signed(logratio_B, desirable_B, beta)
    return UnpairedTerms(-logsigmoid(sign_B * (scaled_B - shift_B.detach().to(scaled_B))), scaled_B.detach())


@dataclass(frozen=True)
class RewardShift:
    """BCO's delta: half the mean reward of desirable answers plus half that of undesirable ones, over all seen so far.

    delta = (E_D+[beta r] + E_D-[beta r]) / 2.  The expectations are running means; where only one kind was seen, delta
    is its mean, and 0 before anything was seen.  Sums and counts, so that the order of the batches does not matter.
    """

    desirable_sum: float = 0.0
    desirable_count: int = 0
    undesirable_sum: float = 0.0
    undesirable_count: int = 0

    def after(self, reward_B: Tensor, desirable_B: Tensor) -> RewardShift:
        """With these rewards (B,) added; desirable_B bool.  Raises ShapeError."""
        require_same_shape(reward=reward_B, desirable=desirable_B)
        reward_B, mask_B = reward_B.detach().double(), desirable_B.bool()
        count = int(mask_B.sum())
        return RewardShift(
            self.desirable_sum + float(reward_B[mask_B].sum()),
            self.desirable_count + count,
            self.undesirable_sum + float(reward_B[~mask_B].sum()),
            self.undesirable_count + len(mask_B) - count,
        )

    @property
    def delta(self) -> float:
        sides = ((self.desirable_sum, self.desirable_count), (self.undesirable_sum, self.undesirable_count))
        means = [total / count for total, count in sides if count]
        return sum(means) / len(means) if means else 0.0


def rank_accuracy(reward_B: Tensor, desirable_B: Tensor) -> float | None:
    """The chance that a desirable answer has a higher reward than an undesirable one, a tie counting half.

    The area under the ROC curve, as (sum of the ranks of the desirable - D (D + 1) / 2) / (D U) with D and U answers of
    the two kinds.  (B,) each; None where one kind is missing.  Raises ShapeError.
    """
    require_same_shape(reward=reward_B, desirable=desirable_B)
    mask_B = desirable_B.bool().cpu()
    found, others = int(mask_B.sum()), int((~mask_B).sum())
    if not found or not others:
        return None
    rank_sum = float(average_ranks(reward_B)[mask_B].sum())
    return (rank_sum - found * (found + 1) / 2) / (found * others)


def _signed(logratio_B: Tensor, desirable_B: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """+1 where desirable and -1 elsewhere, and beta times the log ratio."""
    require_same_shape(logratio=logratio_B, desirable=desirable_B)
    if not beta > 0.0:
        raise ConfigError(f"beta of the unpaired loss is {beta}", fix="use a number above 0; 0.1 is usual")
    scaled_B = beta * at_least_float32(logratio_B)
    return torch.where(desirable_B.bool(), 1.0, -1.0).to(scaled_B), scaled_B


def _weights(desirable_B: Tensor, desirable: float, undesirable: float, like: Tensor) -> Tensor:
    for name, weight in (("desirable_weight", desirable), ("undesirable_weight", undesirable)):
        if not weight >= 0.0:
            raise ConfigError(f"{name} is {weight}", fix="use a number >= 0; 1 is usual")
    like_B = at_least_float32(like.detach())
    return torch.where(desirable_B.bool(), torch.full_like(like_B, desirable), torch.full_like(like_B, undesirable))
