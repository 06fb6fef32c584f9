"""Exploratory preference optimisation (Xie et al. 2024, arXiv:2405.21046): online DPO that leaves known ground.

To each prompt one response of the policy and one of the reference; the reward says which is better; the loss of the
pair, plus alpha times the policy's logprob of the reference's response.
Shapes: B responses (those of a pair adjacent, the policy's first), P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms import own_samples
from tutelage.algorithms.judged import (
    JudgedPairs,
    infer,
    judged_pairs,
    judged_stats,
    loss_named,
    loss_settings,
    margin_stats,
    pair_stats,
    preference_inputs,
    with_rival,
)
from tutelage.algorithms.own_samples import StepState
from tutelage.algorithms.rollout_stats import penalised, scored_rows
from tutelage.config.online_dpo import XPOConfig
from tutelage.math.online_preference import xpo_loss
from tutelage.math.preference import PreferenceSettings
from tutelage.types import Outputs, Ragged, Rollout, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "reference", "reward")
PREFIXES = {"actor": "dpo"}
PUBLISHED: tuple[str, ...] = ("actor",)
initial_state, state_from = own_samples.initial_state, own_samples.state_from


def collect(prompts: Any, roles: Any, cfg: XPOConfig) -> Any:
    """Prompts -> judged pairs of responses."""
    return infer(generate(prompts, roles, cfg), roles, cfg)


def generate(prompts: Any, roles: Any, cfg: XPOConfig) -> Any:
    """Responses of the policy and of the reference."""
    return with_rival(prompts, roles)


def advantages(batch: Rollout, state: StepState, cfg: XPOConfig) -> tuple[JudgedPairs, StepState, Stats]:
    """Which side won; a tie and a pair without scores have no preference."""
    score_P2 = penalised(batch, cfg.xpo.missing_eos_penalty).reshape(-1, 2)
    unscored_P = ~scored_rows(batch).reshape(-1, 2).all(dim=1)
    gap_P = torch.where(unscored_P, 0.0, score_P2[:, 0] - score_P2[:, 1])
    own_P = torch.arange(0, len(batch), 2)
    by_reference_P = gap_P < 0
    chosen_P, rejected_P = own_P + by_reference_P.long(), own_P + (~by_reference_P).long()
    pairs = judged_pairs(batch, chosen_P, rejected_P, gap_P.abs(), by_reference_P, ~unscored_P)
    stats = {
        **judged_stats(batch.select(own_P)),
        **margin_stats(gap_P.abs(), unscored_P),
        "preference/policy_wins": Stat.of((gap_P > 0).double(), gap_P != 0),
        "preference/policy_lead": Stat.of(gap_P, ~unscored_P),
    }
    return pairs, StepState(state.step + 1), stats


def learn(batch: JudgedPairs, roles: Any, cfg: XPOConfig, state: StepState) -> list[dict[str, Any]]:
    """Updates on the pairs."""
    loss = XPOLoss.of(cfg)
    return [roles.update(mb, actor=loss) for mb in batch.minibatches(cfg, state.step)]


@dataclass(frozen=True)
class XPOLoss:
    """Mean over all scored pairs of the pairwise loss (0 for a tie) and the optimism term; an item is a pair."""

    name: str
    settings: PreferenceSettings
    alpha: float

    @classmethod
    def of(cls, cfg: XPOConfig) -> XPOLoss:
        return cls(cfg.xpo.loss, loss_settings(cfg), cfg.xpo.alpha)

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp"})

    def weights(self, batch: JudgedPairs) -> Ragged:
        """1 / scored pairs of the mini-batch; 0 without scores.  Both sums of the paper run over all pairs."""
        scored_P = batch.scored.float()
        return Ragged(scored_P / scored_P.sum().clamp(min=1), torch.ones(len(batch), dtype=torch.int64))

    def items(self, out: Outputs, batch: JudgedPairs) -> tuple[Tensor, Stats]:
        x = preference_inputs(out, batch)
        terms = loss_named(self.name, self.settings)(x, self.settings)
        counted_P, by_reference_P = (flag.to(terms.loss.device) for flag in (batch.counted, batch.by_reference))
        explored_P = torch.where(by_reference_P, x.chosen_logp, x.rejected_logp)
        return xpo_loss(terms.loss, explored_P, counted_P, self.alpha), {
            **pair_stats(x, terms, counted_P),
            "preference_loss": Stat.of(terms.loss, counted_P),
            "reference_logp": Stat.of(explored_P, batch.scored),
        }
