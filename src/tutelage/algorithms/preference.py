"""A preference loss on a mini-batch of pairs: from logprobs of tokens to the loss of a pair, and its statistics.

Shapes: P pairs, N flat response tokens of one side, R flat response tokens of the 2P sequences, K columns of a pair.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.config.dpo import COUPLED, LOSS_READS, OWN_NLL, DPOSettings, has_reference, losses_of
from tutelage.errors import ShapeError
from tutelage.math.preference.divergences import score_limits
from tutelage.math.preference.inputs import (
    PreferenceInputs,
    PreferenceLossFunction,
    PreferenceSettings,
    PreferenceTerms,
)
from tutelage.math.preference.losses import PREFERENCE_LOSSES, combined, require_separable, users_terms
from tutelage.math.preference.sides import ratio_rewards
from tutelage.math.preference.weighing import pair_weights, public_weights
from tutelage.math.reward_loss import pair_accuracy
from tutelage.named import load_function
from tutelage.types import Outputs, Pairs, Ragged, Stat, Stats

LIMITED = ("forward_kl", "alpha_divergence")


@functools.lru_cache(maxsize=64)
def loss_function(name: str) -> PreferenceLossFunction:
    """A loss by its name, or the user's own as module:function.  Raises ConfigError."""
    if name in PREFERENCE_LOSSES:
        return PREFERENCE_LOSSES[name]
    return functools.partial(users_terms, load_function(name, "preference loss"))


def settings_of(dpo: DPOSettings) -> PreferenceSettings:
    """The numbers of the recipe that a loss may read."""
    return PreferenceSettings(
        beta=dpo.beta,
        label_smoothing=dpo.label_smoothing,
        gamma=dpo.gamma,
        alpha=dpo.alpha,
        tau=dpo.tau,
        divergence=dpo.divergence,
        divergence_alpha=dpo.divergence_alpha,
    )


def require_losses(dpo: DPOSettings) -> None:
    """Raises ConfigError for a loss of the user's own that cannot be loaded, or is no function of one pair."""
    for name in losses_of(dpo):
        if name not in LOSS_READS:
            require_separable(load_function(name, "preference loss"), settings_of(dpo), name)


@dataclass(frozen=True)
class Reading:
    """How pairs are read.

    reference  whether the loss reads reference logprobs; else they are 0.
    ld_alpha   weight of the tokens past the shorter answer's length; None: 1.
    weighting  "none", "wpo" or "wpo_aligned".
    """

    reference: bool = True
    ld_alpha: float | None = None
    weighting: str = "none"

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp", "log_collision"} if self.weighting == "wpo_aligned" else {"logp"})

    def inputs(self, out: Outputs, batch: Pairs) -> PreferenceInputs:
        """Raises ShapeError for pairs without the reference logprobs that the loss reads."""
        assert out.logp is not None
        sides = batch.sides(Ragged(out.logp, batch.sequences.response_lens))
        trained = (batch.chosen.trained, batch.rejected.trained)
        lens = [trained_tokens(side, out.logp) for side in trained]
        tokens = [self._token_weights(side, torch.minimum(*lens)) for side in trained]
        whole = [response_sums(logp, side) for logp, side in zip(sides, trained, strict=True)]
        sums = [response_sums(*columns) for columns in zip(sides, trained, tokens, strict=True)]
        reference = self._reference(batch, tokens, sums)
        return PreferenceInputs(
            chosen_logp=sums[0],
            rejected_logp=sums[1],
            ref_chosen_logp=reference[0],
            ref_rejected_logp=reference[1],
            chosen_len=lens[0],
            rejected_len=lens[1],
            chosen_nll=-whole[0] / lens[0],
            weight=self._weights(out, batch, whole, lens),
        )

    def _token_weights(self, trained: Ragged, public_P: Tensor) -> Tensor | None:
        if self.ld_alpha is None:
            return None
        public_N = torch.repeat_interleave(public_P, trained.lens.to(public_P.device))
        return public_weights(trained_position(trained).to(public_P), public_N, self.ld_alpha)

    def _reference(self, batch: Pairs, tokens: list[Tensor | None], sums: list[Tensor]) -> list[Tensor]:
        if not self.reference:
            return [torch.zeros_like(side_P) for side_P in sums]
        if batch.ref_chosen_logp is None or batch.ref_rejected_logp is None:
            raise ShapeError(
                "the pairs have no reference logprobs yet", fix="add them with pairs.adding(ref_logp=...) first"
            )
        return [
            response_sums(batch.ref_chosen_logp, batch.chosen.trained, tokens[0]).to(sums[0]),
            response_sums(batch.ref_rejected_logp, batch.rejected.trained, tokens[1]).to(sums[1]),
        ]

    def _weights(self, out: Outputs, batch: Pairs, whole: list[Tensor], lens: list[Tensor]) -> Tensor:
        if self.weighting == "none":
            return torch.ones_like(whole[0])
        if self.weighting == "wpo":
            return pair_weights(*whole, *lens)
        assert out.log_collision is not None
        sides = batch.sides(Ragged(out.log_collision, batch.sequences.response_lens))
        trained = (batch.chosen.trained, batch.rejected.trained)
        return pair_weights(*whole, *lens, *map(response_sums, sides, trained))


@dataclass(frozen=True)
class PreferenceLoss:
    """Mean over pairs of losses that look at one pair; an item is a pair."""

    losses: tuple[tuple[str, float], ...]
    nll_coef: float
    settings: PreferenceSettings
    reading: Reading

    @property
    def outputs(self) -> frozenset[str]:
        return self.reading.outputs

    def weights(self, batch: Pairs) -> Ragged:
        one = torch.ones(len(batch), dtype=torch.int64)
        return Ragged(torch.full((len(batch),), 1.0 / len(batch)), one)

    def items(self, out: Outputs, batch: Pairs) -> tuple[Tensor, Stats]:
        found = self.reading.inputs(out, batch)
        terms = combined(functions(self.losses), self.nll_coef, found, self.settings)
        return terms.loss, statistics(self, found, terms)


@dataclass(frozen=True)
class CoupledPreferenceLoss:
    """Mean over pairs of losses that look at the whole mini-batch: a sort, or a mean reward.

    rewards_total, rewards_count  rewards of all answers before this mini-batch: what bco_pair's delta averages besides.
    """

    losses: tuple[tuple[str, float], ...]
    nll_coef: float
    settings: PreferenceSettings
    reading: Reading
    rewards_total: float = 0.0
    rewards_count: float = 0.0

    @property
    def outputs(self) -> frozenset[str]:
        return self.reading.outputs

    def scalars(self, out: Outputs, batch: Pairs) -> Tensor:
        return self.reading.inputs(out, batch).columns()

    def couple(self, scalars_BK: Tensor, batch: Any) -> tuple[Tensor, Stats]:
        delta = self.delta(PreferenceInputs.from_columns(scalars_BK))
        found = PreferenceInputs.from_columns(scalars_BK, delta)
        terms = combined(functions(self.losses), self.nll_coef, found, self.settings)
        stats = statistics(self, found, terms)
        if any(name == "bco_pair" for name, _ in self.losses):
            stats["delta"] = Stat(delta, 1)
        return terms.loss.mean(), stats

    def delta(self, found: PreferenceInputs) -> float:
        """The mean reward of all answers so far, those of this mini-batch included."""
        both = torch.cat(ratio_rewards(found, self.settings)).detach().double()
        return (self.rewards_total + float(both.sum())) / (self.rewards_count + len(both))


def preference_loss(
    dpo: DPOSettings, rewards_total: float = 0.0, rewards_count: float = 0.0
) -> PreferenceLoss | CoupledPreferenceLoss:
    """The loss of a recipe.  The rewards before this mini-batch are what bco_pair reads."""
    losses = losses_of(dpo)
    own = sum(weight * OWN_NLL.get(name, 0.0) for name, weight in losses.items())
    named, nll_coef = tuple(losses.items()), own if dpo.nll_coef is None else dpo.nll_coef
    reading = Reading(has_reference(dpo), dpo.ld_alpha, dpo.weighting)
    if any(name in COUPLED for name in losses):
        return CoupledPreferenceLoss(named, nll_coef, settings_of(dpo), reading, rewards_total, rewards_count)
    return PreferenceLoss(named, nll_coef, settings_of(dpo), reading)


def functions(losses: tuple[tuple[str, float], ...]) -> list[tuple[PreferenceLossFunction, float]]:
    return [(loss_function(name), weight) for name, weight in losses]


def statistics(loss: PreferenceLoss | CoupledPreferenceLoss, found: PreferenceInputs, terms: PreferenceTerms) -> Stats:
    """Of these pairs; each with its number of pairs as weight."""
    stats = {
        "accuracy": Stat.of(pair_accuracy(terms.reward_chosen, terms.reward_rejected)),
        "margin": Stat.of(terms.reward_chosen - terms.reward_rejected),
        "reward_chosen": Stat.of(terms.reward_chosen),
        "reward_rejected": Stat.of(terms.reward_rejected),
        "logp_chosen": Stat.of(found.chosen_logp),
        "logp_rejected": Stat.of(found.rejected_logp),
    }
    if loss.nll_coef:
        stats["nll"] = Stat.of(found.chosen_nll)
    if loss.reading.weighting != "none":
        stats["pair_weight"] = Stat.of(found.weight)
    if loss.settings.divergence in LIMITED:
        stats["score_limited"] = Stat.of(score_limits(found, loss.settings))
    return stats


class RewardMean:
    """Sum and number of the rewards of all answers so far: the state of bco_pair, part of the checkpoint.

    What an update found is added when it is needed next, so that nobody waits for it.
    """

    def __init__(self, total: float = 0.0, count: float = 0.0) -> None:
        self.total, self.count = total, count
        self._pending: Any = None

    def after(self, update: Any) -> None:
        """`update`: the pending statistics of an update."""
        self.settle()
        self._pending = update

    def settle(self) -> None:
        if self._pending is not None:
            stats: Mapping[str, Stat] = self._pending.gather()
            self._pending = None
            for name in ("reward_chosen", "reward_rejected"):
                self.total += stats[name].total
                self.count += stats[name].weight

    def state_dict(self) -> dict[str, float]:
        self.settle()
        return {"total": self.total, "count": self.count}


# ---- columns of tokens


def response_sums(logp: Ragged, trained: Ragged, weight_N: Tensor | None = None) -> Tensor:
    """(P,) sum of a column over the trained tokens of each row; what lies under mask 0 is never read."""
    rows = torch.repeat_interleave(torch.arange(len(logp), device=logp.flat.device), logp.lens.to(logp.flat.device))
    kept = torch.where(trained.flat.to(logp.flat.device), logp.flat, 0.0)
    if weight_N is not None:
        kept = kept * weight_N.to(kept)
    return kept.new_zeros(len(logp)).index_add(0, rows, kept)


def trained_tokens(trained: Ragged, like: Tensor) -> Tensor:
    """(P,) trained tokens of each row, in the type and on the device of `like`."""
    rows = torch.repeat_interleave(torch.arange(len(trained)), trained.lens.cpu())
    counts = torch.zeros(len(trained), dtype=torch.float64).index_add(0, rows, trained.flat.cpu().double())
    return counts.to(like)


def trained_position(trained: Ragged) -> Tensor:
    """(N,) how many trained tokens of its row stand before each token."""
    before_N = trained.flat.long().cumsum(0) - trained.flat.long()
    starts = torch.cat([before_N.new_zeros(1), trained.flat.long().cumsum(0)])[trained.offsets()[:-1]]
    return before_N - torch.repeat_interleave(starts, trained.lens)
