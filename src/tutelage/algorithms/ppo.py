"""Proximal policy optimisation for language models (Ziegler et al. 2019; Ouyang et al. 2022; arXiv:2403.17031).

The six steps: rollout; logprobs, reference logprobs, values and scores; reward with KL penalty; GAE; clipped updates;
and, in the schedule, weight publication.   Shapes: B sequences, T response tokens, R flat response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms import policy
from tutelage.algorithms.policy import PolicyLoss as PolicyLoss
from tutelage.algorithms.policy import (
    PolicyState,
    actor_loss,
    budget_scale,
    corrected,
    counted_tokens,
    generate,
    reference_stats,
    sampling_stats,
    scores_of,
    token_weights,
    updates_of,
    with_old_logprobs,
)
from tutelage.algorithms.rollout_stats import scored_rows, sequence_kl_of
from tutelage.algorithms.summed import SummedLoss
from tutelage.config.ppo import PPOConfig
from tutelage.math.advantages import gae, whiten
from tutelage.math.kl import KL_ESTIMATORS, kl_shaped_reward
from tutelage.math.masking import masked_row_sum
from tutelage.math.value_loss import clipped_value_loss
from tutelage.types import Outputs, Ragged, Rollout, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "critic", "reference", "reward")
PREFIXES = {"actor": "policy", "critic": "value"}
PUBLISHED: tuple[str, ...] = ("actor",)
initial_state, state_from = policy.initial_state, policy.state_from


def collect(prompts: Any, roles: Any, cfg: PPOConfig) -> Any:
    """Prompts -> scored rollouts; works on any part of a batch."""
    return infer(generate(prompts, roles, cfg), roles, cfg)


def infer(rollout: Any, roles: Any, cfg: PPOConfig) -> Any:
    """Every inference pass, under the weights of the moment: old logprobs, reference logprobs, values, scores."""
    if cfg.critic.trunk == "actor":
        ref_logp, score = roles.reference.logprobs(rollout), roles.reward.score(rollout)
        return roles.actor.with_values(rollout).adding(ref_logp=ref_logp, score=score)
    return rollout.adding(
        old_logp=roles.actor.logprobs(rollout),
        ref_logp=roles.reference.logprobs(rollout),
        value=roles.critic.values(rollout),
        score=roles.reward.score(rollout),
    )


def advantages(batch: Rollout, state: PolicyState, cfg: PPOConfig) -> tuple[Rollout, PolicyState, Stats]:
    """KL-shaped rewards, GAE and whitening over the global batch, once, before it is cut.

    A response without a score weighs nothing, and no statistic but those of the KL knows it.
    """
    batch = with_old_logprobs(batch, cfg)
    trained, valid_B = batch.sequences.trained, scored_rows(batch)
    mask_BT = trained.padded() & valid_B[:, None]
    logp_BT, ref_logp_BT = batch.column("old_logp").padded(), batch.column("ref_logp").padded()
    score_B = scores_of(batch, cfg).masked_fill(~valid_B, 0.0)
    in_reward = cfg.kl.placement == "reward"
    penalty_BT = KL_ESTIMATORS[cfg.kl.estimator if in_reward else "k1"](logp_BT, ref_logp_BT)
    coef = state.kl.coef if in_reward else 0.0
    token_reward_BT = batch.token_reward.padded() if batch.token_reward is not None else None
    reward_BT = kl_shaped_reward(score_B, penalty_BT, mask_BT, coef, token_reward_BT)
    if cfg.ppo.whiten_rewards:
        reward_BT = whiten(reward_BT, mask_BT, shift_mean=False)

    value = batch.column("value")
    value_BT = value.padded()[:, : mask_BT.shape[1]]
    bootstrap_B = None
    if cfg.ppo.bootstrap_truncated:
        after_last = value.flat[value.offsets()[1:] - 1]
        bootstrap_B = after_last * (~batch.finished).float()
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, cfg.ppo.gamma, cfg.ppo.lam, bootstrap_B)
    signal_BT = whiten(advantage_BT, mask_BT) if cfg.ppo.whiten_advantages else advantage_BT
    signal_BT, off_policy = corrected(signal_BT, batch, cfg)

    kl_B = sequence_kl_of(batch, "old_logp", "ref_logp")
    scale = budget_scale(float(kl_B.mean()), cfg)
    non_score_B = -coef * masked_row_sum(penalty_BT, mask_BT)
    stats = {
        **sampling_stats(batch, valid_B),
        **reference_stats(batch, kl_B, score_B, non_score_B, scale, state.kl.coef),
        **off_policy,
        "reward/rlhf": Stat.of(score_B + non_score_B, valid_B),
        "reward/non_score": Stat.of(non_score_B, valid_B),
        "value/explained_variance": explained_variance(value_BT, return_BT, mask_BT),
    }
    state = state.after(batch, state.kl.after(float(kl_B.mean()), len(batch)))
    lens = trained.lens
    scored = batch.adding(
        advantage=Ragged.from_padded(signal_BT * scale, lens),
        ret=Ragged.from_padded(return_BT, lens),
        counted=None if bool(valid_B.all()) else valid_B,
    )
    return scored, state, stats


def learn(batch: Any, roles: Any, cfg: PPOConfig, state: PolicyState) -> list[dict[str, Any]]:
    """Updates by the policy loss: `epochs` passes over the batch, each in `minibatches` parts.

    A critic on the actor's trunk is trained in the actor's update, by the sum of both losses.
    """
    critic, updates = ValueLoss(cfg), enumerate(updates_of(batch, cfg, state.step))
    if cfg.critic.trunk == "actor":

        def both(minibatch: Any, number: int) -> SummedLoss:
            parts: dict[str, Any] = {"actor": actor_loss(cfg, state, minibatch, number), "critic": critic}
            return SummedLoss(parts)

        return [roles.update(mb, actor=both(mb, k)) for k, mb in updates]
    return [roles.update(mb, actor=actor_loss(cfg, state, mb, k), critic=critic) for k, mb in updates]


@dataclass(frozen=True)
class ValueLoss:
    """vf_coef times the clipped value loss; an item is a token."""

    cfg: PPOConfig

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"value"})

    def weights(self, batch: Rollout) -> Ragged:
        return token_weights(batch, self.cfg)

    def items(self, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        assert out.value is not None
        mask = counted_tokens(batch)
        old_value, ret = without_bootstrap(batch.column("value")), batch.column("ret").flat
        terms = clipped_value_loss(out.value, old_value, ret, self.cfg.ppo.clip_value)
        stats = {"clip_fraction": Stat.of(terms.clipped, mask), "error": Stat.of(terms.loss, mask)}
        return self.cfg.ppo.vf_coef * terms.loss, stats


def without_bootstrap(value: Ragged) -> Tensor:
    """(R,) the values before each response token: every row without its last entry."""
    keep = torch.ones_like(value.flat, dtype=torch.bool)
    keep[value.offsets()[1:] - 1] = False
    return value.flat[keep]


def explained_variance(value_BT: Tensor, return_BT: Tensor, mask_BT: Tensor) -> Stat:
    """1 - Var(return - value) / Var(return) over real tokens; 0 where the return is constant."""
    ret, value = return_BT[mask_BT].double(), value_BT[mask_BT].double()
    variance = float(ret.var(correction=0)) if ret.numel() else 0.0
    return Stat(1 - float((ret - value).var(correction=0)) / variance if variance > 0 else 0.0, 1)
