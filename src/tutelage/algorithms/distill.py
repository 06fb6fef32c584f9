"""On-policy distillation: a student learns from a teacher's distribution at the states that it visits itself.

(Agarwal et al. 2024, GKD, arXiv:2306.13649; Gu et al. 2024, MiniLLM, arXiv:2306.08543; Thinking Machines 2025,
"On-Policy Distillation".)  Responses of the student; the teacher's logprobs at every position; a divergence of the two,
differentiated over the teacher's likeliest tokens, or from the sampled token as a policy gradient.
Shapes: B sequences, T response tokens, R flat response tokens, C candidate tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms import own_samples
from tutelage.algorithms.own_samples import StepState, generate, token_weights, updates_of
from tutelage.algorithms.policy import counted_tokens
from tutelage.algorithms.rollout_stats import kl_stats, rollout_stats, sequence_kl_of
from tutelage.config.distill import DistillConfig
from tutelage.math.distillation import distillation_loss, less_others_at_position, reverse_kl_returns
from tutelage.math.policy_loss import ppo_policy_loss
from tutelage.types import Outputs, Ragged, Rollout, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "teacher", "reward")
PREFIXES = {"actor": "policy"}
PUBLISHED: tuple[str, ...] = ("actor",)
initial_state, state_from = own_samples.initial_state, own_samples.state_from


def roles_needed(cfg: DistillConfig) -> tuple[str, ...]:
    """A reward is only reported, so none is built where the recipe names none."""
    return ROLES if cfg.rewarded else ("actor", "teacher")


def collect(prompts: Any, roles: Any, cfg: DistillConfig) -> Any:
    """Prompts -> judged rollouts; works on any part of a batch."""
    return infer(generate(prompts, roles, cfg), roles, cfg)


def infer(rollout: Any, roles: Any, cfg: DistillConfig) -> Any:
    """Every inference pass: what the teacher says of the tokens, the student's old logprobs, scores."""
    found = judged(rollout, roles, cfg)
    if cfg.distill.from_sampled_tokens:
        found = found.adding(old_logp=roles.actor.logprobs(rollout))
    return found.adding(score=roles.reward.score(rollout)) if cfg.rewarded else found


def judged(rollout: Any, roles: Any, cfg: DistillConfig) -> Any:
    """The rollout with the teacher's logprobs, of the sampled tokens or of its likeliest ones too."""
    if cfg.distill.from_sampled_tokens:
        return rollout.adding(teacher_logp=roles.teacher.logprobs(rollout))
    return roles.teacher.with_candidates(rollout, cfg.distill.candidates)


def advantages(batch: Rollout, state: StepState, cfg: DistillConfig) -> tuple[Rollout, StepState, Stats]:
    """Distance from the teacher; where the loss is a policy gradient, what each token is paid."""
    lens, mask_BT = batch.sequences.response_lens, batch.sequences.trained.padded()
    stats = {**rollout_stats(batch), **teacher_stats(batch)}
    if cfg.distill.from_sampled_tokens:
        old_BT, teacher_BT = batch.column("old_logp").padded(), batch.column("teacher_logp").padded()
        paid_BT = reverse_kl_returns(old_BT, teacher_BT, mask_BT, cfg.distill.discount)
        if cfg.distill.baseline == "leave_one_out":
            paid_BT = less_others_at_position(paid_BT, mask_BT)
        batch = batch.adding(advantage=Ragged.from_padded(paid_BT, lens))
        gap = (batch.column("old_logp").flat - batch.rollout_logp.flat).abs()
        stats["policy/logp_gap"] = Stat.of(gap, batch.sequences.trained.flat)
    return batch, StepState(state.step + 1), stats


def learn(batch: Any, roles: Any, cfg: DistillConfig, state: StepState) -> list[dict[str, Any]]:
    """Updates on the batch: `epochs` passes, each in `minibatches` parts."""
    loss = loss_of(cfg)
    return [roles.update(mb, actor=loss) for mb in updates_of(batch, cfg, state.step)]


def teacher_stats(batch: Rollout) -> Stats:
    """Reverse KL from the teacher, k1 of the sampler's own logprobs: of the student that sampled; nats."""
    return kl_stats(sequence_kl_of(batch, "rollout_logp", "teacher_logp"), batch, "teacher/kl_")


@dataclass(frozen=True)
class DivergenceLoss:
    """A divergence over the teacher's candidates and the tail of all other tokens; an item is a token."""

    cfg: DistillConfig
    outputs: frozenset[str] = frozenset({"candidate_logp"})

    def weights(self, batch: Rollout) -> Ragged:
        return token_weights(batch, self.cfg)

    def items(self, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        assert out.candidate_logp is not None
        settings, mask = self.cfg.distill, counted_tokens(batch)
        teacher_RC = batch.column("candidate_logp").flat.to(out.candidate_logp)
        terms = distillation_loss(settings.divergence, out.candidate_logp, teacher_RC, settings.beta)
        return torch.where(mask.to(terms.loss.device), terms.loss, 0.0), {
            "divergence": Stat.of(terms.loss, mask),
            "tail": Stat.of(terms.tail, mask),
            "teacher_tail": Stat.of(terms.teacher_tail, mask),
        }


@dataclass(frozen=True)
class SampledLoss:
    """The clipped policy gradient whose advantage is the log ratio of teacher to student; an item is a token."""

    cfg: DistillConfig
    outputs: frozenset[str] = frozenset({"logp"})

    def weights(self, batch: Rollout) -> Ragged:
        return token_weights(batch, self.cfg)

    def items(self, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        mask, clip = counted_tokens(batch).to(out.logp.device), self.cfg.distill.clip
        old_logp, paid = (batch.column(name).flat.to(out.logp) for name in ("old_logp", "advantage"))
        terms = ppo_policy_loss(out.logp, old_logp, paid, clip, clip)
        return torch.where(mask, terms.loss, 0.0), {
            "clip_fraction": Stat.of(terms.clipped, mask),
            "approx_kl": Stat.of(terms.approx_kl, mask),
            "ratio_mean": Stat.of(terms.ratio, mask),
        }


def loss_of(cfg: DistillConfig) -> DivergenceLoss | SampledLoss:
    return SampledLoss(cfg) if cfg.distill.from_sampled_tokens else DivergenceLoss(cfg)
