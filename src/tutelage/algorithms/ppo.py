"""Proximal policy optimisation for language models (Ziegler et al. 2019; Ouyang et al. 2022; arXiv:2403.17031).

The six steps: rollout; logprobs, reference logprobs, values and scores; reward with KL penalty; GAE; clipped updates;
and, in the schedule, weight publication.   Shapes: B sequences, T response tokens, R flat response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tutelage.config.ppo import PPOConfig
from tutelage.math.advantages import gae, whiten
from tutelage.math.keyed import keyed_permutation, sample_key
from tutelage.math.kl import KL_ESTIMATORS, kl_loss, kl_shaped_reward
from tutelage.math.kl_control import AdaptiveKL, FixedKL, KLController, kl_controller_from_state
from tutelage.math.masking import aggregation_weights
from tutelage.math.policy_loss import ppo_policy_loss
from tutelage.math.value_loss import clipped_value_loss
from tutelage.types import Outputs, Ragged, Rollout, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "critic", "reference", "reward")
PREFIXES = {"actor": "policy", "critic": "value"}
PUBLISHED: tuple[str, ...] = ("actor",)


@dataclass(frozen=True)
class PPOState:
    """What a step depends on besides weights: the step, and the KL controller."""

    step: int
    kl: KLController

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "kl": self.kl.state_dict()}


def initial_state(cfg: PPOConfig) -> PPOState:
    if cfg.kl.controller == "adaptive":
        return PPOState(0, AdaptiveKL(cfg.kl.coef, cfg.kl.target, cfg.kl.horizon))
    return PPOState(0, FixedKL(cfg.kl.coef))


def state_from(saved: Mapping[str, Any]) -> PPOState:
    return PPOState(saved["step"], kl_controller_from_state(saved["kl"]))


def collect(prompts: Any, roles: Any, cfg: PPOConfig) -> Any:
    """Prompts -> scored rollouts; works on any part of a batch."""
    rollout = roles.actor.generate(prompts)
    return rollout.adding(
        old_logp=roles.actor.logprobs(rollout),
        ref_logp=roles.reference.logprobs(rollout),
        value=roles.critic.values(rollout),
        score=roles.reward.score(rollout),
    )


def advantages(batch: Rollout, state: PPOState, cfg: PPOConfig) -> tuple[Rollout, PPOState, Stats]:
    """KL-shaped rewards, GAE and whitening over the global batch, once, before it is cut."""
    trained = batch.sequences.trained
    mask_BT = trained.padded()
    logp_BT, ref_logp_BT = batch.column("old_logp").padded(), batch.column("ref_logp").padded()
    assert batch.score is not None, "advantages runs after collect"
    score_B = batch.score.total - cfg.ppo.missing_eos_penalty * (~batch.finished).float()
    in_reward = cfg.kl.placement == "reward"
    penalty = KL_ESTIMATORS[cfg.kl.estimator if in_reward else "k1"]
    coef = state.kl.coef if in_reward else 0.0
    token_reward_BT = batch.token_reward.padded() if batch.token_reward is not None else None
    penalty_BT = penalty(logp_BT, ref_logp_BT)
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

    kl_B = masked_row_sum(KL_ESTIMATORS["k1"](logp_BT, ref_logp_BT), mask_BT)
    scale = budget_scale(float(kl_B.mean()), cfg)
    non_score_B = -coef * masked_row_sum(penalty_BT, mask_BT)
    stats = collected_stats(batch, kl_B, score_B, non_score_B, scale, state.kl.coef)
    stats["value/explained_variance"] = explained_variance(value_BT, return_BT, mask_BT)
    state = replace(state, step=state.step + 1, kl=state.kl.after(float(kl_B.mean()), len(batch)))
    lens = trained.lens
    scored = batch.adding(
        advantage=Ragged.from_padded(signal_BT * scale, lens), ret=Ragged.from_padded(return_BT, lens)
    )
    return scored, state, stats


def learn(batch: Any, roles: Any, cfg: PPOConfig, state: PPOState) -> list[dict[str, Any]]:
    """Clipped updates: `epochs` passes over the batch, each in `minibatches` parts."""
    actor, critic = PolicyLoss(cfg, state.kl.coef), ValueLoss(cfg)

    def order(epoch: int, n: int) -> Tensor:
        return keyed_permutation(n, sample_key(cfg.seed, state.step, "minibatches", epoch, "shuffle"))

    return [
        roles.update(mb, actor=actor, critic=critic)
        for mb in batch.minibatches(cfg.ppo.epochs, cfg.ppo.minibatches, order)
    ]


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped surrogate, entropy bonus, and the KL term where the recipe puts it into the loss; an item is a token."""

    cfg: PPOConfig
    kl_coef: float

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp", "entropy"})

    def weights(self, batch: Rollout) -> Ragged:
        return token_weights(batch, self.cfg)

    def items(self, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        assert out.entropy is not None
        ppo, mask = self.cfg.ppo, batch.sequences.trained.flat
        old_logp, advantage = batch.column("old_logp").flat, batch.column("advantage").flat
        terms = ppo_policy_loss(out.logp, old_logp, advantage, ppo.clip_low, ppo.clip_high, ppo.dual_clip)
        loss = terms.loss
        if ppo.entropy_coef:
            loss = loss - ppo.entropy_coef * out.entropy
        stats = {
            "clip_fraction": Stat.of(terms.clipped | terms.dual_clipped, mask),
            "approx_kl": Stat.of(terms.approx_kl, mask),
            "ratio_mean": Stat.of(terms.ratio, mask),
            "entropy": Stat.of(out.entropy, mask),
        }
        if self.cfg.kl.placement == "loss":
            term = kl_loss(self.cfg.kl.estimator, out.logp, batch.column("ref_logp").flat)
            loss = loss + self.kl_coef * term
            stats["kl_loss"] = Stat.of(term, mask)
        return loss, stats


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
        mask = batch.sequences.trained.flat
        old_value, ret = without_bootstrap(batch.column("value")), batch.column("ret").flat
        terms = clipped_value_loss(out.value, old_value, ret, self.cfg.ppo.clip_value)
        stats = {"clip_fraction": Stat.of(terms.clipped, mask), "error": Stat.of(terms.loss, mask)}
        return self.cfg.ppo.vf_coef * terms.loss, stats


def token_weights(batch: Rollout, cfg: PPOConfig) -> Ragged:
    """The aggregation weight of every response token of a mini-batch; 0 under the mask."""
    trained = batch.sequences.trained
    weight_BT = aggregation_weights(trained.padded(), cfg.ppo.aggregation, cfg.rollout.max_new_tokens)
    return Ragged.from_padded(weight_BT, trained.lens)


def without_bootstrap(value: Ragged) -> Tensor:
    """(R,) the values before each response token: every row without its last entry."""
    keep = torch.ones_like(value.flat, dtype=torch.bool)
    keep[value.offsets()[1:] - 1] = False
    return value.flat[keep]


def budget_scale(sequence_kl: float, cfg: PPOConfig) -> float:
    """budget / KL past the budget where the recipe lowers the learning signal, else 1."""
    if cfg.kl.budget is None or cfg.kl.on_budget != "lower" or sequence_kl <= cfg.kl.budget:
        return 1.0
    return cfg.kl.budget / sequence_kl


def masked_row_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) sum over the tokens with mask 1; what lies under mask 0 is never read."""
    return torch.where(mask_BT, x_BT, 0.0).sum(dim=1)


def explained_variance(value_BT: Tensor, return_BT: Tensor, mask_BT: Tensor) -> Stat:
    """1 - Var(return - value) / Var(return) over real tokens; 0 where the return is constant."""
    ret, value = return_BT[mask_BT].double(), value_BT[mask_BT].double()
    variance = float(ret.var(correction=0)) if ret.numel() else 0.0
    return Stat(1 - float((ret - value).var(correction=0)) / variance if variance > 0 else 0.0, 1)


def collected_stats(
    batch: Rollout, kl_B: Tensor, score_B: Tensor, non_score_B: Tensor, scale: float, kl_coef: float
) -> Stats:
    """What the rollouts of one step look like; sequence KL is k1 summed over tokens, token KL its mean over tokens.

    score_B: after the missing-EOS penalty.  non_score_B: what the KL penalty added to each reward, in the recipe's
    estimator; 0 where the KL is a term of the loss.
    """
    assert batch.score is not None
    trained, lens = batch.sequences.trained, batch.sequences.response_lens.double()
    gap = (batch.column("old_logp").flat - batch.rollout_logp.flat).abs()
    total = batch.score.total.double()
    spread = float(total.std()) if len(batch) > 1 else 0.0
    return {
        "reward/score_mean": Stat.of(total),
        "reward/score_std": Stat(spread, 1),
        **{f"reward/source/{name}": Stat.of(batch.score.values[:, k]) for k, name in enumerate(batch.score.names)},
        "reward/non_score": Stat.of(non_score_B),
        "reward/rlhf": Stat.of(score_B + non_score_B),
        "kl/sequence": Stat.of(kl_B),
        "kl/token": Stat(float(kl_B.double().sum()), float(trained.flat.sum())),
        "kl/coef": Stat(kl_coef, 1),
        "kl/budget_scale": Stat(scale, 1),
        "policy/logp_gap": Stat.of(gap, trained.flat),
        "rollout/length_mean": Stat.of(lens),
        "rollout/length_max": Stat(float(lens.max()), 1),
        "rollout/truncated_fraction": Stat.of((~batch.finished).double()),
        "rollout/tokens": Stat(float(lens.sum()), 1),
    }
