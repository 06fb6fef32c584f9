"""Rejection sampling: supervised fine-tuning on the best of several samples (RAFT, Dong et al. 2023, arXiv:2304.06767).

n responses to each prompt, scored; the best are kept; the likelihood of what is kept is maximised.  Every step does so
on fresh samples of the policy as it has become.  One step with `keep: best` is best-of-n distillation.
Shapes: B sequences, T response tokens, R flat response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms import own_samples
from tutelage.algorithms.own_samples import StepState, generate, token_weights, updates_of
from tutelage.algorithms.policy import counted_tokens
from tutelage.algorithms.rollout_stats import kl_stats, penalised, rollout_stats, scored_rows, sequence_kl_of
from tutelage.config.raft import RAFTConfig
from tutelage.math.rejection import duplicates, kept_responses
from tutelage.types import Outputs, Ragged, Rollout, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "reference", "reward")
PREFIXES = {"actor": "policy"}
PUBLISHED: tuple[str, ...] = ("actor",)
initial_state, state_from = own_samples.initial_state, own_samples.state_from


def roles_needed(cfg: RAFTConfig) -> tuple[str, ...]:
    """Without a KL term nothing asks the reference anything, so none is built."""
    return ROLES if cfg.kl.coef > 0 else ("actor", "reward")


def collect(prompts: Any, roles: Any, cfg: RAFTConfig) -> Any:
    """Prompts -> scored rollouts; works on any part of a batch that keeps a prompt's responses together."""
    return infer(generate(prompts, roles, cfg), roles, cfg)


def infer(rollout: Any, roles: Any, cfg: RAFTConfig) -> Any:
    """Scores; with a KL term the logprobs of policy and reference too."""
    columns = {"score": roles.reward.score(rollout)}
    if cfg.kl.coef > 0:
        columns |= {"old_logp": roles.actor.logprobs(rollout), "ref_logp": roles.reference.logprobs(rollout)}
    return rollout.adding(**columns)


def advantages(batch: Rollout, state: StepState, cfg: RAFTConfig) -> tuple[Rollout, StepState, Stats]:
    """What is kept, over the global batch; the others are left out of it.

    Where fewer are kept than there are mini-batches, others stay to fill them, and weigh nothing.
    """
    stats, own = rollout_stats(batch), cfg.raft
    score_B, valid_B = penalised(batch, own.missing_eos_penalty), scored_rows(batch)
    if batch.ref_logp is not None:
        kl_B = sequence_kl_of(batch, "old_logp", "ref_logp")
        score_B = score_B - cfg.kl.coef * kl_B
        stats |= {**kl_stats(kl_B, batch), "kl/coef": Stat(cfg.kl.coef, 1)}
    kept_B = kept_responses(score_B, batch.group, valid_B, own.keep, top_k=own.top_k, threshold=own.threshold)
    stats |= kept_stats(batch, score_B, valid_B, kept_B)
    chosen = torch.nonzero(kept_B).squeeze(1)
    filling = torch.nonzero(~kept_B).squeeze(1)[: max(own.minibatches - len(chosen), 0)]
    index = torch.cat([chosen, filling]).sort().values
    return batch.adding(counted=kept_B).select(index), StepState(state.step + 1), stats


def learn(batch: Any, roles: Any, cfg: RAFTConfig, state: StepState) -> list[dict[str, Any]]:
    """Updates on what was kept: `epochs` passes, each in `minibatches` parts."""
    return [roles.update(mb, actor=KeptLoss(cfg)) for mb in updates_of(batch, cfg, state.step)]


def kept_stats(batch: Rollout, score_B: Tensor, valid_B: Tensor, kept_B: Tensor) -> Stats:
    """score_B: that by which they were chosen.  Means over kept responses, or over all that have a score."""
    repeated = duplicates(batch.sequences.response_rows(), batch.group.tolist(), kept_B.tolist())
    lens = batch.sequences.response_lens.double()
    answered = torch.zeros(int(batch.group.max()) + 1 if len(batch) else 0, dtype=torch.bool)
    answered[batch.group[kept_B]] = True
    return {
        "raft/score_kept": Stat.of(score_B, kept_B),
        "raft/score_all": Stat.of(score_B, valid_B),
        "raft/kept_fraction": Stat.of(kept_B.double(), valid_B),
        "raft/prompts_kept_fraction": Stat.of(answered[batch.group.unique()].double()),
        "raft/duplicate_fraction": Stat.of(torch.tensor(repeated, dtype=torch.float64), kept_B),
        "raft/length_kept": Stat.of(lens, kept_B),
    }


@dataclass(frozen=True)
class KeptLoss:
    """Minus the logprob of each token of the kept responses, at the temperature of the rollouts; an item is a token."""

    cfg: RAFTConfig
    outputs: frozenset[str] = frozenset({"logp"})

    def weights(self, batch: Rollout) -> Ragged:
        return token_weights(batch, self.cfg)

    def items(self, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        mask = counted_tokens(batch).to(out.logp.device)
        return torch.where(mask, -out.logp, 0.0), {"nll": Stat.of(-out.logp, mask)}
