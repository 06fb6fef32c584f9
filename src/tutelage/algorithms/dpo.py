"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and its relatives: a policy from preference
pairs, without rollouts and without a reward model.  The losses are in `math.preference`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutelage.algorithms.preference import RewardMean, preference_loss, require_losses
from tutelage.config.dpo import DPOConfig, has_reference, losses_of
from tutelage.types import Pairs, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "reference")
PREFIXES = {"actor": "dpo", "reference": "dpo"}
PUBLISHED: tuple[str, ...] = ()


def roles_needed(cfg: DPOConfig) -> tuple[str, ...]:
    """Losses without a reference build none.  Raises ConfigError for a loss of the user's own that cannot be used."""
    require_losses(cfg.dpo)
    return ROLES if has_reference(cfg.dpo) else ("actor",)


@dataclass(frozen=True)
class DPOState:
    """rewards: what bco_pair's delta is the mean of; None under other losses."""

    step: int
    rewards: RewardMean | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "rewards": None if self.rewards is None else self.rewards.state_dict()}


def initial_state(cfg: DPOConfig) -> DPOState:
    return DPOState(0, RewardMean() if "bco_pair" in losses_of(cfg.dpo) else None)


def state_from(saved: Mapping[str, Any]) -> DPOState:
    rewards = saved.get("rewards")
    return DPOState(saved["step"], None if rewards is None else RewardMean(rewards["total"], rewards["count"]))


def collect(batch: Any, roles: Any, cfg: DPOConfig) -> Any:
    """The data, with the reference's logprobs of both answers where the loss reads them."""
    return batch.adding(ref_logp=roles.reference.logprobs(batch)) if has_reference(cfg.dpo) else batch


def advantages(batch: Pairs, state: DPOState, cfg: DPOConfig) -> tuple[Pairs, DPOState, Stats]:
    tokens = float(batch.sequences.trained.flat.sum())
    stats = {"data/pairs": Stat(len(batch), 1), "data/trained_tokens": Stat(tokens, 1)}
    return batch, DPOState(state.step + 1, state.rewards), stats


def learn(batch: Any, roles: Any, cfg: DPOConfig, state: DPOState) -> list[dict[str, Any]]:
    """One update; then, every `sync_every` steps, the reference moves towards the policy (TR-DPO)."""
    if state.rewards is None:
        return [{**roles.update(batch, actor=preference_loss(cfg.dpo)), **followed(roles, cfg, state.step + 1)}]
    state.rewards.settle()
    loss = preference_loss(cfg.dpo, state.rewards.total, state.rewards.count)
    update = roles.update(batch, actor=loss)
    state.rewards.after(update["actor"])
    return [{**update, **followed(roles, cfg, state.step + 1)}]


def followed(roles: Any, cfg: DPOConfig, step: int) -> dict[str, Any]:
    """ref <- a policy + (1 - a) ref   (TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656)."""
    if not cfg.dpo.sync_every or step % cfg.dpo.sync_every:
        return {}
    return {"reference": roles.reference.follow(roles.actor.whole_weights(), cfg.dpo.sync_alpha)}
