"""Bradley-Terry reward models from preference pairs (Ouyang et al. 2022, eq. 1).   Shapes: P pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.config.reward_model import RewardModelConfig
from tutelage.math.reward_loss import bradley_terry_loss, pair_accuracy
from tutelage.types import Outputs, Pairs, Ragged, Stat, Stats

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


def advantages(batch: Pairs, state: RewardModelState, cfg: RewardModelConfig) -> tuple[Pairs, RewardModelState, Stats]:
    return batch, RewardModelState(state.step + 1), {"data/pairs": Stat(len(batch), 1)}


def learn(batch: Any, roles: Any, cfg: RewardModelConfig, state: RewardModelState) -> list[dict[str, Any]]:
    return [roles.update(batch, reward=PairLoss.of(cfg))]


@dataclass(frozen=True)
class PairLoss:
    """Mean over pairs of the Bradley-Terry loss with margin and centring; an item is a pair."""

    centring: float
    use_margin: bool

    @classmethod
    def of(cls, cfg: RewardModelConfig) -> PairLoss:
        return cls(cfg.reward_model.centring, cfg.reward_model.use_margin)

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"score"})

    def weights(self, batch: Pairs) -> Ragged:
        one = torch.ones(len(batch), dtype=torch.int64)
        return Ragged(torch.full((len(batch),), 1.0 / len(batch)), one)

    def items(self, out: Outputs, batch: Pairs) -> tuple[Tensor, Stats]:
        assert out.score is not None
        chosen_P, rejected_P = out.score.chunk(2)
        margin_P = batch.margin.to(chosen_P.device) if self.use_margin else None
        loss_P = bradley_terry_loss(chosen_P, rejected_P, margin_P, self.centring)
        return loss_P, {
            "accuracy": Stat.of(pair_accuracy(chosen_P, rejected_P)),
            "margin": Stat.of(chosen_P - rejected_P),
            "score_mean": Stat.of((chosen_P + rejected_P) / 2),
        }
