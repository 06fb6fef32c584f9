"""Online DPO and IPO (Guo et al. 2024, arXiv:2402.04792; Calandriello et al. 2024), and iterative DPO.

Several responses to each prompt from the policy of the moment; the reward ranks them; the best one is preferred to the
worst one, and a loss of preference pairs is trained on that.  Iterative DPO (Xiong et al. 2023, arXiv:2312.11456) lets
the reference follow the policy every few steps.
Shapes: B responses, P pairs, R flat response tokens of the 2P sequences (all chosen, then all rejected).
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
)
from tutelage.algorithms.own_samples import StepState, generate
from tutelage.algorithms.rollout_stats import penalised, scored_rows
from tutelage.config.online_dpo import OnlineDPOConfig
from tutelage.math.online_preference import best_and_worst
from tutelage.math.preference import PreferenceSettings
from tutelage.types import Outputs, Ragged, Rollout, Stats

ROLES: tuple[str, ...] = ("actor", "reference", "reward")
PREFIXES = {"actor": "dpo", "reference": "dpo"}
PUBLISHED: tuple[str, ...] = ("actor",)
initial_state, state_from = own_samples.initial_state, own_samples.state_from


def collect(prompts: Any, roles: Any, cfg: OnlineDPOConfig) -> Any:
    """Prompts -> judged rollouts; works on any part of a batch that keeps a prompt's responses together."""
    return infer(generate(prompts, roles, cfg), roles, cfg)


def advantages(batch: Rollout, state: StepState, cfg: OnlineDPOConfig) -> tuple[JudgedPairs, StepState, Stats]:
    """The best response of each prompt against its worst one, over the global batch."""
    score_B = penalised(batch, cfg.online_dpo.missing_eos_penalty)
    found = best_and_worst(score_B, batch.group, scored_rows(batch))
    none_P = torch.zeros_like(found.unscored)
    pairs = judged_pairs(batch, found.best, found.worst, found.margin, none_P, ~found.unscored)
    stats = {**judged_stats(batch), **margin_stats(found.margin, found.unscored)}
    return pairs, StepState(state.step + 1), stats


def learn(batch: JudgedPairs, roles: Any, cfg: OnlineDPOConfig, state: StepState) -> list[dict[str, Any]]:
    """Updates on the pairs; after every `reference_every` steps the reference becomes the policy."""
    loss, every = PairLoss.of(cfg), cfg.online_dpo.reference_every
    updates = [roles.update(mb, actor=loss) for mb in batch.minibatches(cfg, state.step)]
    if every is None or (state.step + 1) % every:
        return updates
    return [*updates, {"reference": roles.reference.follow(roles.actor.whole_weights(), 1.0)}]


@dataclass(frozen=True)
class PairLoss:
    """Mean over the pairs with a preference of a pairwise loss; an item is a pair.  Ties weigh 0."""

    name: str
    settings: PreferenceSettings

    @classmethod
    def of(cls, cfg: OnlineDPOConfig) -> PairLoss:
        return cls(cfg.online_dpo.loss, loss_settings(cfg))

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp"})

    def weights(self, batch: JudgedPairs) -> Ragged:
        """1 / (pairs of the mini-batch with a preference), 0 for the others; all 0 where there is none."""
        counted_P = batch.counted.float()
        return Ragged(counted_P / counted_P.sum().clamp(min=1), torch.ones(len(batch), dtype=torch.int64))

    def items(self, out: Outputs, batch: JudgedPairs) -> tuple[Tensor, Stats]:
        x = preference_inputs(out, batch)
        terms = loss_named(self.name, self.settings)(x, self.settings)
        return terms.loss, pair_stats(x, terms, batch.counted.to(terms.loss.device))
