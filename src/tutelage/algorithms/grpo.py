"""Group relative policy optimisation (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300): no critic.

Several responses to each prompt; a response's advantage is its score against the others of its group, the same for all
of its tokens; clipped updates with the KL to a reference in the loss.
Shapes: B sequences, T response tokens, R flat response tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tutelage.algorithms import policy
from tutelage.algorithms.policy import (
    PolicyLoss,
    PolicyState,
    budget_scale,
    corrected,
    generate,
    masked_row_sum,
    reference_stats,
    rollout_stats,
    scores_of,
    sequence_kl_of,
    updates_of,
    with_old_logprobs,
)
from tutelage.config.grpo import GRPOConfig
from tutelage.math.group_advantages import Groups, group_advantages, group_statistics
from tutelage.math.kl import KL_ESTIMATORS
from tutelage.types import Ragged, Rollout, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "reference", "reward")
PREFIXES = {"actor": "policy"}
PUBLISHED: tuple[str, ...] = ("actor",)
initial_state, state_from = policy.initial_state, policy.state_from


def roles_needed(cfg: GRPOConfig) -> tuple[str, ...]:
    """Without a KL term nothing asks the reference anything, so none is built."""
    return ROLES if cfg.kl.coef > 0 else ("actor", "reward")


def collect(prompts: Any, roles: Any, cfg: GRPOConfig) -> Any:
    """Prompts -> scored rollouts; works on any part of a batch that keeps a prompt's responses together."""
    return infer(generate(prompts, roles, cfg), roles, cfg)


def infer(rollout: Any, roles: Any, cfg: GRPOConfig) -> Any:
    """Every inference pass, under the weights of the moment: old logprobs, reference logprobs, scores."""
    columns = {"old_logp": roles.actor.logprobs(rollout), "score": roles.reward.score(rollout)}
    if "reference" in roles_needed(cfg):
        columns["ref_logp"] = roles.reference.logprobs(rollout)
    return rollout.adding(**columns)


def advantages(batch: Rollout, state: PolicyState, cfg: GRPOConfig) -> tuple[Rollout, PolicyState, Stats]:
    """Scores against the group's, over the global batch, once, before it is cut."""
    batch = with_old_logprobs(batch, cfg)
    mask_BT = batch.sequences.trained.padded()
    score_B = scores_of(batch, cfg)
    if batch.token_reward is not None:
        score_B = score_B + masked_row_sum(batch.token_reward.padded(), mask_BT)
    stats = rollout_stats(batch)
    scale, paid_B, kl = 1.0, torch.zeros_like(score_B), state.kl
    if batch.ref_logp is not None:
        kl_B = sequence_kl_of(batch)
        scale = budget_scale(float(kl_B.mean()), cfg)
        if cfg.kl.placement == "reward":
            penalty = KL_ESTIMATORS[cfg.kl.estimator]
            penalty_BT = penalty(batch.column("old_logp").padded(), batch.ref_logp.padded())
            paid_B = -state.kl.coef * masked_row_sum(penalty_BT, mask_BT)
        stats |= reference_stats(batch, kl_B, score_B, paid_B, scale, state.kl.coef)
        kl = state.kl.after(float(kl_B.mean()), len(batch))

    rewarded_B = score_B + paid_B
    signal_B = group_advantages(rewarded_B, batch.group, cfg.grpo.scale_rewards, cfg.grpo.std_eps)
    groups = group_statistics(rewarded_B, batch.group)
    signal_BT, off_policy = corrected(signal_B[:, None] * mask_BT, batch, cfg)
    scored = batch.adding(
        advantage=Ragged.from_padded(signal_BT * scale, batch.sequences.response_lens), counted=groups.size >= 2
    )
    return scored, replace(state, step=state.step + 1, kl=kl), {**stats, **group_stats(groups), **off_policy}


def learn(batch: Any, roles: Any, cfg: GRPOConfig, state: PolicyState) -> list[dict[str, Any]]:
    """Clipped updates: `epochs` passes over the batch, each in `minibatches` parts."""
    actor = PolicyLoss(cfg, state.kl.coef)
    return [roles.update(mb, actor=actor) for mb in updates_of(batch, cfg, state.step)]


def group_stats(groups: Groups) -> Stats:
    """How much the groups say: nothing where all scores of a group are equal, or where a response has no other."""
    several_B = groups.size >= 2
    return {
        "reward/group_std": Stat.of(groups.std, several_B),
        "reward/group_equal_fraction": Stat.of(groups.equal.double(), several_B),
        "reward/group_singletons": Stat(float((~several_B).sum()), 1),
    }
