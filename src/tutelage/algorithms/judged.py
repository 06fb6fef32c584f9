"""What the online preference algorithms share: judged pairs, their mini-batches, their state and their statistics.

Shapes: B responses, P pairs, T response tokens, R flat response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms.own_samples import shuffled
from tutelage.algorithms.rollout_stats import kl_stats, rollout_stats, sequence_kl_of, trained_sums
from tutelage.config.online_dpo import NashMDConfig, OnlineDPOConfig, PairSettings, XPOConfig
from tutelage.errors import ShapeError
from tutelage.math.preference import (
    PREFERENCE_LOSSES,
    PreferenceInputs,
    PreferenceLossFunction,
    PreferenceSettings,
    PreferenceTerms,
)
from tutelage.math.preference.losses import require_separable, users_terms
from tutelage.math.reward_loss import pair_accuracy
from tutelage.named import load_function
from tutelage.types import Outputs, Pairs, Ragged, Rollout, Sequences, Stat, Stats

PreferenceConfig = OnlineDPOConfig | XPOConfig | NashMDConfig


def with_rival(prompts: Any, roles: Any) -> Any:
    """Pairs of responses of the policy and of the reference role, whatever that answers with.

    Their draws have keys of their own: else both would draw alike.
    """
    own = roles.actor.generate(prompts)
    return roles.reference.beside(own, roles.reference.generate(prompts.adding(purpose="rival")))


def infer(rollout: Any, roles: Any, cfg: PreferenceConfig) -> Any:
    """Reference logprobs and scores of all responses."""
    return rollout.adding(ref_logp=roles.reference.logprobs(rollout), score=roles.reward.score(rollout))


@dataclass(frozen=True, eq=False)
class JudgedPairs:
    """P pairs of fresh responses with reference logprobs; a pair is one item and is never cut.

    pairs            chosen has the higher score, margin (P,) is the difference; 0: no preference.
    by_reference     (P,) bool: the chosen response is the reference's.
    weights_versions (P, 2) of the policy when chosen and rejected were sampled.
    scored           (P,) bool: both responses have a score.
    """

    pairs: Pairs
    by_reference: Tensor
    weights_versions: Tensor
    scored: Tensor

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def sequences(self) -> Sequences:
        """(2P) sequences: all chosen, then all rejected."""
        return self.pairs.sequences

    @property
    def weights_version(self) -> Tensor:
        """(2P,) as `sequences`."""
        return self.weights_versions.T.flatten()

    @property
    def counted(self) -> Tensor:
        """(P,) bool: pairs with a preference."""
        return self.pairs.margin > 0

    def item_tokens(self) -> Tensor:
        return self.pairs.item_tokens()

    def select(self, index_P: Tensor) -> JudgedPairs:
        return replace(
            self,
            pairs=self.pairs.select(index_P),
            by_reference=self.by_reference[index_P],
            weights_versions=self.weights_versions[index_P],
            scored=self.scored[index_P],
        )

    def minibatches(self, cfg: OnlineDPOConfig | XPOConfig, step: int) -> Iterator[JudgedPairs]:
        """`epochs` passes, each in `minibatches` parts, in an order keyed by (seed, step, pass)."""
        settings: PairSettings = getattr(cfg, cfg.algorithm)
        if len(self) < settings.minibatches:
            raise ShapeError(
                f"{settings.minibatches} mini-batches cannot be cut from {len(self)} pairs",
                fix=f"lower {cfg.algorithm}.minibatches",
            )
        for epoch in range(settings.epochs):
            for part in torch.tensor_split(shuffled(cfg.seed, step)(epoch, len(self)), settings.minibatches):
                yield self.select(part)


def judged_pairs(
    batch: Rollout,
    chosen_P: Tensor,
    rejected_P: Tensor,
    margin_P: Tensor,
    by_reference_P: Tensor,
    scored_P: Tensor,
) -> JudgedPairs:
    """Rows chosen and rejected of a rollout, with the reference's logprobs, as pairs."""
    ref = batch.column("ref_logp")
    pairs = Pairs(
        chosen=batch.sequences.select(chosen_P),
        rejected=batch.sequences.select(rejected_P),
        margin=margin_P,
        ids=tuple(batch.prompt_ids[i] for i in chosen_P.tolist()),
        ref_chosen_logp=ref.select(chosen_P),
        ref_rejected_logp=ref.select(rejected_P),
    )
    versions = torch.stack([batch.weights_version[chosen_P], batch.weights_version[rejected_P]], dim=1)
    return JudgedPairs(pairs, by_reference_P, versions, scored_P)


# ---- losses ----


def loss_settings(cfg: OnlineDPOConfig | XPOConfig) -> PreferenceSettings:
    """The numbers of the recipe that a loss of pairs may read."""
    settings: PairSettings = getattr(cfg, cfg.algorithm)
    return PreferenceSettings(settings.beta, settings.label_smoothing, tau=settings.tau)


@lru_cache(maxsize=32)
def loss_named(name: str, settings: PreferenceSettings) -> PreferenceLossFunction:
    """A loss of pairs by its name, or a function of the user's own.

    Raises ConfigError for a name that leads nowhere, and for a function that looks at other pairs.
    """
    if ":" not in name:
        return PREFERENCE_LOSSES[name]
    function = load_function(name, "preference loss")
    require_separable(function, settings, name)
    return partial(users_terms, function)


def preference_inputs(out: Outputs, batch: JudgedPairs) -> PreferenceInputs:
    """What a loss of pairs reads.  Raises ShapeError for pairs without reference logprobs."""
    assert out.logp is not None
    pairs, device = batch.pairs, out.logp.device
    if pairs.ref_chosen_logp is None or pairs.ref_rejected_logp is None:
        raise ShapeError("the pairs have no reference logprobs", fix="add them with pairs.adding(ref_logp=...)")
    sides = zip(
        pairs.sides(Ragged(out.logp, batch.sequences.response_lens)),
        (pairs.ref_chosen_logp.to(device), pairs.ref_rejected_logp.to(device)),
        (pairs.chosen.trained, pairs.rejected.trained),
        strict=True,
    )
    (chosen_P, ref_chosen_P, chosen_len_P), (rejected_P, ref_rejected_P, rejected_len_P) = (
        (trained_sums(logp, trained), trained_sums(ref, trained), trained.padded().sum(dim=1).clamp(min=1).to(device))
        for logp, ref, trained in sides
    )
    return PreferenceInputs.of(chosen_P, rejected_P, ref_chosen_P, ref_rejected_P, chosen_len_P, rejected_len_P)


def pair_stats(x: PreferenceInputs, terms: PreferenceTerms, counted_P: Tensor) -> Stats:
    """Implicit rewards and logprobs of the pairs that have a preference."""
    chosen_P, rejected_P = terms.reward_chosen, terms.reward_rejected
    return {
        "accuracy": Stat.of(pair_accuracy(chosen_P, rejected_P), counted_P),
        "margin": Stat.of(chosen_P - rejected_P, counted_P),
        "reward_chosen": Stat.of(chosen_P, counted_P),
        "reward_rejected": Stat.of(rejected_P, counted_P),
        "logp_chosen": Stat.of(x.chosen_logp, counted_P),
        "logp_rejected": Stat.of(x.rejected_logp, counted_P),
    }


# ---- scores and statistics ----


def judged_stats(batch: Rollout) -> Stats:
    """`rollout_stats`, and the distance of the policy's responses from the reference.

    The KL is k1 of the sampler's own logprobs, so it is that of the policy that sampled; nats.
    """
    return {**rollout_stats(batch), **kl_stats(sequence_kl_of(batch, "rollout_logp", "ref_logp"), batch)}


def margin_stats(margin_P: Tensor, unscored_P: Tensor) -> Stats:
    """How much the judgements say: margins of the scores, pairs without a preference."""
    scored_P = ~unscored_P
    return {
        "preference/score_margin": Stat.of(margin_P, scored_P),
        "preference/tied_fraction": Stat.of((margin_P == 0).double(), scored_P),
        "preference/unscored": Stat(float(unscored_P.sum()), 1),
    }
