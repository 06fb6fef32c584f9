"""What PPO and its critic-free relatives share: clipped loss, mini-batches, correction for the sampler, statistics.

Shapes: B sequences, T response tokens, R flat response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.config.generating import PolicyGradientConfig
from tutelage.config.rollouts import PolicySettings
from tutelage.math.importance import importance_weights
from tutelage.math.keyed import keyed_permutation, sample_key
from tutelage.math.kl import KL_ESTIMATORS, kl_loss
from tutelage.math.kl_control import AdaptiveKL, FixedKL, KLController, kl_controller_from_state
from tutelage.math.masking import aggregation_weights
from tutelage.math.policy_loss import ppo_policy_loss
from tutelage.types import Outputs, Ragged, Rollout, Stat, Stats


def settings_of(cfg: PolicyGradientConfig) -> PolicySettings:
    """The section of the algorithm, which has its name."""
    return getattr(cfg, cfg.algorithm)


def initial_kl(cfg: PolicyGradientConfig) -> KLController:
    if cfg.kl.controller == "adaptive":
        return AdaptiveKL(cfg.kl.coef, cfg.kl.target, cfg.kl.horizon)
    return FixedKL(cfg.kl.coef)


@dataclass(frozen=True)
class PolicyState:
    """What a step depends on besides weights: the step, and the KL controller."""

    step: int
    kl: KLController

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "kl": self.kl.state_dict()}


def initial_state(cfg: PolicyGradientConfig) -> PolicyState:
    return PolicyState(0, initial_kl(cfg))


def state_from(saved: Mapping[str, Any]) -> PolicyState:
    return PolicyState(saved["step"], kl_controller_from_state(saved["kl"]))


def generate(prompts: Any, roles: Any, cfg: PolicyGradientConfig) -> Any:
    """Prompts -> rollouts, which a schedule may begin ahead of their step."""
    return roles.actor.generate(prompts)


def updates_of(batch: Any, cfg: PolicyGradientConfig, step: int) -> Iterator[Any]:
    """`epochs` passes over the batch, each in `minibatches` parts, in an order keyed by (seed, step, pass)."""

    def order(epoch: int, n: int) -> Tensor:
        return keyed_permutation(n, sample_key(cfg.seed, step, "minibatches", epoch, "shuffle"))

    settings = settings_of(cfg)
    return batch.minibatches(settings.epochs, settings.minibatches, order)


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped surrogate, entropy bonus, and the KL term where the recipe puts it into the loss; an item is a token."""

    cfg: PolicyGradientConfig
    kl_coef: float

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp", "entropy"})

    def weights(self, batch: Rollout) -> Ragged:
        return token_weights(batch, self.cfg)

    def items(self, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        assert out.entropy is not None
        settings, mask = settings_of(self.cfg), counted_tokens(batch)
        old_logp, advantage = batch.column("old_logp").flat, batch.column("advantage").flat
        terms = ppo_policy_loss(
            out.logp, old_logp, advantage, settings.clip_low, settings.clip_high, settings.dual_clip
        )
        loss = terms.loss
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * out.entropy
        stats = {
            "clip_fraction": Stat.of(terms.clipped | terms.dual_clipped, mask),
            "approx_kl": Stat.of(terms.approx_kl, mask),
            "ratio_mean": Stat.of(terms.ratio, mask),
            "entropy": Stat.of(out.entropy, mask),
        }
        if self.cfg.kl.placement == "loss" and batch.ref_logp is not None:
            term = kl_loss(self.cfg.kl.estimator, out.logp, batch.column("ref_logp").flat)
            loss = loss + self.kl_coef * term
            stats["kl_loss"] = Stat.of(term, mask)
        return loss, stats


def counted_tokens(batch: Rollout) -> Tensor:
    """(R,) bool: trained tokens of the rows that the loss counts."""
    trained = batch.sequences.trained
    if batch.counted is None:
        return trained.flat
    return trained.flat & torch.repeat_interleave(batch.counted, trained.lens)


def token_weights(batch: Rollout, cfg: PolicyGradientConfig) -> Ragged:
    """The aggregation weight of every response token of a mini-batch; 0 under the mask and in uncounted rows."""
    lens = batch.sequences.response_lens
    mask_BT = Ragged(counted_tokens(batch), lens).padded()
    weight_BT = aggregation_weights(mask_BT, settings_of(cfg).aggregation, cfg.rollout.max_new_tokens)
    return Ragged.from_padded(weight_BT, lens)


def with_old_logprobs(batch: Rollout, cfg: PolicyGradientConfig) -> Rollout:
    """The batch with the old logprobs of the recipe: the trainer's, as inferred, or the sampler's own."""
    return batch if cfg.off_policy.old_logprobs == "trainer" else batch.adding(old_logp=batch.rollout_logp)


def corrected(advantage_BT: Tensor, batch: Rollout, cfg: PolicyGradientConfig) -> tuple[Tensor, Stats]:
    """The advantages times the importance weights of trainer against sampler, and `off_policy/...` statistics.

    Every branch of the clipped loss is linear in the advantage, so a factor >= 0 on it is the same factor on the loss.
    """
    kind = cfg.off_policy.correction
    if kind == "none":
        return advantage_BT, {}
    mask_BT = batch.sequences.trained.padded()
    old_BT, rollout_BT = batch.column("old_logp").padded(), batch.rollout_logp.padded()
    found = importance_weights(old_BT, rollout_BT, mask_BT, kind, cfg.off_policy.cap)
    return advantage_BT * found.weight, {
        "off_policy/ratio_mean": Stat.of(found.ratio, mask_BT),
        "off_policy/ratio_max": Stat(float(found.ratio.max()), 1),
        "off_policy/truncated_fraction": Stat.of(found.capped, mask_BT),
        "off_policy/mismatch_kl": Stat.of(found.mismatch_kl, mask_BT),
    }


def masked_row_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) sum over the tokens with mask 1; what lies under mask 0 is never read."""
    return torch.where(mask_BT, x_BT, 0.0).sum(dim=1)


def sequence_kl_of(batch: Rollout) -> Tensor:
    """(B,) k1 of old against reference logprobs, summed over the trained tokens; nats."""
    k1 = KL_ESTIMATORS["k1"](batch.column("old_logp").padded(), batch.column("ref_logp").padded())
    return masked_row_sum(k1, batch.sequences.trained.padded())


def budget_scale(sequence_kl: float, cfg: PolicyGradientConfig) -> float:
    """budget / KL past the budget where the recipe lowers the learning signal, else 1."""
    if cfg.kl.budget is None or cfg.kl.on_budget != "lower" or sequence_kl <= cfg.kl.budget:
        return 1.0
    return cfg.kl.budget / sequence_kl


def scores_of(batch: Rollout, cfg: PolicyGradientConfig) -> Tensor:
    """(B,) the scores, less the penalty of responses that the length limit cut."""
    assert batch.score is not None, "advantages runs after collect"
    return batch.score.total - settings_of(cfg).missing_eos_penalty * (~batch.finished).float()


def rollout_stats(batch: Rollout) -> Stats:
    """Rewards and lengths of the rollouts of one step."""
    assert batch.score is not None
    lens, total = batch.sequences.response_lens.double(), batch.score.total.double()
    gap = (batch.column("old_logp").flat - batch.rollout_logp.flat).abs()
    spread = float(total.std()) if len(batch) > 1 else 0.0
    return {
        "reward/score_mean": Stat.of(total),
        "reward/score_std": Stat(spread, 1),
        **{f"reward/source/{name}": Stat.of(batch.score.values[:, k]) for k, name in enumerate(batch.score.names)},
        "policy/logp_gap": Stat.of(gap, batch.sequences.trained.flat),
        "rollout/length_mean": Stat.of(lens),
        "rollout/length_max": Stat(float(lens.max()), 1),
        "rollout/truncated_fraction": Stat.of((~batch.finished).double()),
        "rollout/tokens": Stat(float(lens.sum()), 1),
    }


def reference_stats(
    batch: Rollout, kl_B: Tensor, score_B: Tensor, non_score_B: Tensor, scale: float, kl_coef: float
) -> Stats:
    """Distance from the reference; sequence KL is k1 summed over tokens, token KL its mean over tokens.

    score_B: after the missing-EOS penalty.  non_score_B: what the KL penalty added to each reward, in the recipe's
    estimator; 0 where the KL is a term of the loss.
    """
    return {
        "reward/non_score": Stat.of(non_score_B),
        "reward/rlhf": Stat.of(score_B + non_score_B),
        "kl/sequence": Stat.of(kl_B),
        "kl/token": Stat(float(kl_B.double().sum()), float(batch.sequences.trained.flat.sum())),
        "kl/coef": Stat(kl_coef, 1),
        "kl/budget_scale": Stat(scale, 1),
    }
