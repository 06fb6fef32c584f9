"""Reward models: of preference pairs (Ouyang et al. 2022, eq. 1), and of steps (Lightman et al. 2023).

Shapes: P pairs, R flat response tokens, N labelled steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.config.reward_model import RewardModelConfig
from tutelage.math.process_reward import step_accuracy, step_bce_loss, step_mse_loss
from tutelage.math.reward_loss import bradley_terry_loss, pair_accuracy, scaled_bradley_terry_loss
from tutelage.types import Outputs, Pairs, Ragged, Stat, Stats, StepLabels

ROLES: tuple[str, ...] = ("reward",)
PREFIXES = {"reward": "rm"}
PUBLISHED: tuple[str, ...] = ()


@dataclass(frozen=True)
class RewardModelState:
    step: int

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}


def initial_state(cfg: RewardModelConfig) -> RewardModelState:
    return RewardModelState(0)


def state_from(saved: Mapping[str, Any]) -> RewardModelState:
    return RewardModelState(saved["step"])


def collect(batch: Any, roles: Any, cfg: RewardModelConfig) -> Any:
    """The data is the batch."""
    return batch


def advantages(
    batch: Pairs | StepLabels, state: RewardModelState, cfg: RewardModelConfig
) -> tuple[Pairs | StepLabels, RewardModelState, Stats]:
    counts = {"data/pairs": float(len(batch))}
    if isinstance(batch, StepLabels):
        counts = {"data/answers": float(len(batch)), "data/steps": float(batch.labels.lens.sum())}
    return batch, RewardModelState(state.step + 1), {name: Stat(count, 1) for name, count in counts.items()}


def learn(batch: Any, roles: Any, cfg: RewardModelConfig, state: RewardModelState) -> list[dict[str, Any]]:
    return [roles.update(batch, reward=loss_of(cfg))]


def loss_of(cfg: RewardModelConfig) -> PairLoss | StepLoss:
    """The loss of `reward_model.loss`, in training and on held-out rows."""
    settings = cfg.reward_model
    return StepLoss(settings.loss) if settings.scores_steps else PairLoss.of(cfg)


@dataclass(frozen=True)
class PairLoss:
    """Mean over pairs of the Bradley-Terry loss, a margin inside or as a factor, and centring; an item is a pair."""

    centring: float
    use_margin: bool
    scaled: bool = False

    @classmethod
    def of(cls, cfg: RewardModelConfig) -> PairLoss:
        settings = cfg.reward_model
        return cls(settings.centring, settings.use_margin, settings.loss == "scaled_bradley_terry")

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"score"})

    def weights(self, batch: Pairs) -> Ragged:
        one = torch.ones(len(batch), dtype=torch.int64)
        return Ragged(torch.full((len(batch),), 1.0 / len(batch)), one)

    def items(self, out: Outputs, batch: Pairs) -> tuple[Tensor, Stats]:
        assert out.score is not None
        chosen_P, rejected_P = out.score.chunk(2)
        margin_P = batch.margin.to(chosen_P.device)
        if self.scaled:
            loss_P = scaled_bradley_terry_loss(chosen_P, rejected_P, margin_P, self.centring)
        else:
            loss_P = bradley_terry_loss(chosen_P, rejected_P, margin_P if self.use_margin else None, self.centring)
        return loss_P, {
            "accuracy": Stat.of(pair_accuracy(chosen_P, rejected_P)),
            "margin": Stat.of(chosen_P - rejected_P),
            "score_mean": Stat.of((chosen_P + rejected_P) / 2),
        }


@dataclass(frozen=True)
class StepLoss:
    """Mean over the labelled steps of the mini-batch, each scored at its last token; an answer is never cut.

    kind  step_bce or step_mse.
    """

    kind: str

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"token_score"})

    def weights(self, batch: StepLabels) -> Ragged:
        steps = batch.labels.flat.shape[0]
        return batch.labels.with_flat(torch.full((steps,), 1.0 / steps))

    def items(self, out: Outputs, batch: StepLabels) -> tuple[Tensor, Stats]:
        assert out.token_score is not None
        score_N = out.token_score[batch.sequences.trained.flat.to(out.token_score.device)]
        label_N = batch.labels.flat.to(score_N.device)
        if self.kind == "step_mse":
            return step_mse_loss(score_N, label_N), {"score_mean": Stat.of(score_N)}
        probability_N = torch.sigmoid(score_N.detach())
        return step_bce_loss(score_N, label_N), {
            "accuracy": Stat.of(step_accuracy(score_N, label_N)),
            "score_mean": Stat.of(probability_N),
        }
