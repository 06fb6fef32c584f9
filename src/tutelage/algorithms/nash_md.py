"""Nash-MD (Munos et al. 2023, arXiv:2312.00886): the policy plays against a mixture of itself and its reference.

To each prompt one response of the policy and one of the geometric mixture pi^(1 - c) ref^c; the policy gradient of the
probability that the first is preferred, with the KL to the reference.
Shapes: B responses (those of a pair adjacent, the policy's first), P pairs, R flat response tokens of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms import own_samples
from tutelage.algorithms.judged import infer, judged_stats, margin_stats, with_rival
from tutelage.algorithms.own_samples import StepState, shuffled
from tutelage.algorithms.policy import counted_tokens
from tutelage.algorithms.rollout_stats import penalised, scored_rows, trained_sums
from tutelage.config.online_dpo import NashMDConfig
from tutelage.errors import ConfigError
from tutelage.math.masking import aggregation_weights
from tutelage.math.online_preference import Preference, nash_md_loss, preference_of
from tutelage.named import load_function
from tutelage.types import Outputs, Ragged, Rollout, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "reference", "reward")
PREFIXES = {"actor": "policy"}
PUBLISHED: tuple[str, ...] = ("actor",)
initial_state, state_from = own_samples.initial_state, own_samples.state_from


def collect(prompts: Any, roles: Any, cfg: NashMDConfig) -> Any:
    """Prompts -> judged pairs of responses."""
    return infer(generate(prompts, roles, cfg), roles, cfg)


def generate(prompts: Any, roles: Any, cfg: NashMDConfig) -> Any:
    """Responses of the policy and of the mixture."""
    return with_rival(prompts, roles)


def advantages(batch: Rollout, state: StepState, cfg: NashMDConfig) -> tuple[Rollout, StepState, Stats]:
    """The policy's responses, each with the probability that it is preferred less 1/2 on all of its tokens."""
    score_P2 = penalised(batch, cfg.nash_md.missing_eos_penalty).reshape(-1, 2)
    unscored_P = ~scored_rows(batch).reshape(-1, 2).all(dim=1)
    score_P2 = torch.where(unscored_P[:, None], 0.0, score_P2)
    probability_P = probabilities(score_P2[:, 0], score_P2[:, 1], cfg.nash_md.preference)
    own = batch.select(torch.arange(0, len(batch), 2))
    lens = own.sequences.response_lens
    gap_P = score_P2[:, 0] - score_P2[:, 1]
    scored = own.adding(advantage=Ragged(torch.repeat_interleave(probability_P - 0.5, lens), lens), counted=~unscored_P)
    stats = {
        **judged_stats(own),
        **margin_stats(gap_P.abs(), unscored_P),
        "preference/policy_lead": Stat.of(gap_P, ~unscored_P),
        "preference/probability": Stat.of(probability_P, ~unscored_P),
    }
    return scored, StepState(state.step + 1), stats


def learn(batch: Rollout, roles: Any, cfg: NashMDConfig, state: StepState) -> list[dict[str, Any]]:
    """One pass over the responses."""
    loss = NashMDLoss.of(cfg)
    return [roles.update(mb, actor=loss) for mb in minibatches(batch, cfg, state.step)]


def minibatches(batch: Rollout, cfg: NashMDConfig, step: int) -> Iterator[Rollout]:
    """One pass in `minibatches` parts, in an order keyed by (seed, step)."""
    return batch.minibatches(1, cfg.nash_md.minibatches, shuffled(cfg.seed, step))


@lru_cache(maxsize=32)
def preference_named(kind: str) -> Preference:
    """A preference model by its name, or a function of the user's own."""
    found: Preference = load_function(kind, "preference model") if ":" in kind else preference_of(kind)
    return found


def probabilities(score_P: Tensor, rival_score_P: Tensor, kind: str) -> Tensor:
    """(P,) float32 probability that the policy's response is preferred.

    Raises ConfigError where a user's function returns something else.
    """
    found = preference_named(kind)(score_P, rival_score_P)
    fits = isinstance(found, Tensor) and found.shape == score_P.shape and bool(((found >= 0) & (found <= 1)).all())
    if not fits:
        raise ConfigError(
            f"nash_md.preference {kind!r} did not return {len(score_P)} probabilities",
            fix="return a tensor of the shape of the scores, every entry from 0 to 1",
        )
    return found.detach().float()


@dataclass(frozen=True)
class NashMDLoss:
    """Sum over the tokens of a response, mean over the responses that count; items are tokens, never cut by response.

    whole  a token pays for the KL of its whole response, not for its own alone.
    """

    beta: float
    whole: bool

    @classmethod
    def of(cls, cfg: NashMDConfig) -> NashMDLoss:
        return cls(cfg.nash_md.beta, cfg.nash_md.kl == "sequence")

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp", "entropy"})

    def weights(self, batch: Rollout) -> Ragged:
        """1 / (responses of the mini-batch that count) on each of their trained tokens."""
        lens = batch.sequences.response_lens
        mask_BT = Ragged(counted_tokens(batch), lens).padded()
        return Ragged.from_padded(aggregation_weights(mask_BT, "seq_mean_token_sum"), lens)

    def items(self, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        assert out.entropy is not None
        trained, device = batch.sequences.trained, out.logp.device
        lens = trained.lens.to(device)
        ref_R = batch.column("ref_logp").flat.to(out.logp)
        token_R = torch.where(trained.flat.to(device), out.logp.detach() - ref_R, 0.0)
        ratio_B = trained_sums(Ragged(token_R, lens), trained)
        paid_R = torch.repeat_interleave(ratio_B, lens) if self.whole else token_R
        loss_R = nash_md_loss(out.logp, batch.column("advantage").flat.to(out.logp), paid_R, self.beta)
        mask_R = counted_tokens(batch).to(device)
        return loss_R, {
            "entropy": Stat.of(out.entropy, mask_R),
            "log_ratio": Stat.of(ratio_B, None if batch.counted is None else batch.counted.to(device)),
        }
