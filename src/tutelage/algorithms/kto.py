"""Preference optimisation from single answers: KTO (Ethayarajh et al. 2024), APO-zero, BCO.

Shapes: B answers, R flat response tokens (for KTO of the 2B sequences: all answers, then all mismatched ones).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms.preference import response_sums
from tutelage.config.kto import KTOConfig, KTOSettings
from tutelage.errors import ShapeError
from tutelage.math.unpaired_loss import (
    RewardShift,
    UnpairedTerms,
    apo_zero_unpaired_loss,
    bco_loss,
    kto_loss,
    kto_reference_point,
    rank_accuracy,
)
from tutelage.types import Labelled, Outputs, Ragged, Stat, Stats, Unpaired

ROLES: tuple[str, ...] = ("actor", "reference")
PREFIXES = {"actor": "kto"}
PUBLISHED: tuple[str, ...] = ()


@dataclass(frozen=True)
class KTOState:
    """shift: BCO's running reward shift; other losses leave it as it is."""

    step: int
    shift: RewardShift = field(default_factory=RewardShift)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "shift": asdict(self.shift)}


def initial_state(cfg: KTOConfig) -> KTOState:
    return KTOState(0)


def state_from(saved: Mapping[str, Any]) -> KTOState:
    return KTOState(saved["step"], RewardShift(**saved["shift"]))


def collect(batch: Any, roles: Any, cfg: KTOConfig) -> Any:
    """The data with the reference's logprobs; BCO also needs the policy's own, for the reward shift."""
    with_reference = batch.adding(ref_logp=roles.reference.logprobs(batch))
    if cfg.kto.loss != "bco":
        return with_reference
    return with_reference.adding(old_logp=roles.actor.logprobs(batch))


def advantages(batch: Any, state: KTOState, cfg: KTOConfig) -> tuple[Any, KTOState, Stats]:
    """BCO's reward shift, with this batch's rewards in it; counts."""
    answers = batch.answers if isinstance(batch, Unpaired) else batch.sequences
    stats = {
        "data/trained_tokens": Stat(float(answers.trained.flat.sum()), 1),
        "data/desirable": Stat(float(batch.desirable.sum()), 1),
        "data/undesirable": Stat(float((~batch.desirable).sum()), 1),
    }
    after = replace(state, step=state.step + 1)
    if cfg.kto.loss != "bco":
        return batch, after, stats
    shift = state.shift.after(implicit_rewards(batch, cfg.kto.beta), batch.desirable)
    stats["data/delta"] = Stat(shift.delta, 1)
    return batch.adding(shift=torch.full((len(batch),), shift.delta)), replace(after, shift=shift), stats


def learn(batch: Any, roles: Any, cfg: KTOConfig, state: KTOState) -> list[dict[str, Any]]:
    return [roles.update(batch, actor=training_loss(cfg))]


def training_loss(cfg: KTOConfig) -> MatchedLoss | AnswerLoss:
    """The loss of an update: coupled by the KL estimate for kto, per answer for the others."""
    return MatchedLoss(cfg.kto) if cfg.kto.loss == "kto" else AnswerLoss(cfg.kto)


def held_out_loss(cfg: KTOConfig) -> MatchedLoss | HeldOutAnswerLoss:
    """The same loss on held-out answers as one mini-batch, with how well the implicit rewards tell them apart."""
    return MatchedLoss(cfg.kto) if cfg.kto.loss == "kto" else HeldOutAnswerLoss(cfg.kto)


@dataclass(frozen=True)
class MatchedLoss:
    """KTO: the mean over the answers of the mini-batch; an answer and its mismatched one are one item, of two scalars.

    The reference point is estimated once from all mismatched answers of the mini-batch, whatever the micro-batches and
    ranks, and gets no gradient.
    """

    kto: KTOSettings

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp"})

    def scalars(self, out: Outputs, batch: Unpaired) -> Tensor:
        """(B, 2): logprobs of answer and mismatched answer, summed over trained tokens."""
        assert out.logp is not None
        answer, mismatched = batch.sides(Ragged(out.logp, batch.sequences.response_lens))
        columns = (response_sums(answer, batch.answers.trained), response_sums(mismatched, batch.mismatched.trained))
        return torch.stack(columns, dim=1)

    def couple(self, scalars_BK: Tensor, batch: Unpaired) -> tuple[Tensor, Stats]:
        answer_B, mismatched_B = scalars_BK.unbind(1)
        ref_answer_B = reference_sums(batch.ref_answer_logp, batch.answers.trained).to(answer_B)
        ref_mismatched_B = reference_sums(batch.ref_mismatched_logp, batch.mismatched.trained).to(answer_B)
        point = kto_reference_point(mismatched_B - ref_mismatched_B)
        desirable_B = batch.desirable.to(answer_B.device)
        weights = (self.kto.desirable_weight, self.kto.undesirable_weight)
        terms = kto_loss(answer_B - ref_answer_B, desirable_B, point, self.kto.beta, *weights)
        stats = {**answer_stats(terms, answer_B, desirable_B), **told_apart(terms.reward, desirable_B)}
        return terms.loss.mean(), {**stats, "kl": Stat(float(point), 1)}


@dataclass(frozen=True)
class AnswerLoss:
    """APO-zero and BCO: the mean over the answers of the mini-batch; an item is an answer."""

    kto: KTOSettings

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp"})

    def weights(self, batch: Labelled) -> Ragged:
        one = torch.ones(len(batch), dtype=torch.int64)
        return Ragged(torch.full((len(batch),), 1.0 / len(batch)), one)

    def items(self, out: Outputs, batch: Labelled) -> tuple[Tensor, Stats]:
        logp_B = answer_sums(out, batch)
        terms = labelled_terms(self.kto, logp_B, batch, batch.shift)
        return terms.loss, answer_stats(terms, logp_B, batch.desirable.to(logp_B.device))


@dataclass(frozen=True)
class HeldOutAnswerLoss:
    """`AnswerLoss` on a whole held-out set: BCO's reward shift is the set's own, and the rewards are ranked."""

    kto: KTOSettings

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp"})

    def scalars(self, out: Outputs, batch: Labelled) -> Tensor:
        return answer_sums(out, batch)[:, None]

    def couple(self, scalars_BK: Tensor, batch: Labelled) -> tuple[Tensor, Stats]:
        logp_B = scalars_BK.squeeze(1)
        desirable_B = batch.desirable.to(logp_B.device)
        ref_B = reference_sums(batch.ref_logp, batch.sequences.trained).to(logp_B)
        delta = RewardShift().after(self.kto.beta * (logp_B - ref_B), desirable_B).delta
        terms = labelled_terms(self.kto, logp_B, batch, torch.full_like(logp_B.detach(), delta))
        stats = {**answer_stats(terms, logp_B, desirable_B), **told_apart(terms.reward, desirable_B)}
        return terms.loss.mean(), stats if self.kto.loss != "bco" else {**stats, "delta": Stat(delta, 1)}


def answer_sums(out: Outputs, batch: Labelled) -> Tensor:
    """(B,) logprobs of whole answers under the policy."""
    assert out.logp is not None
    return response_sums(Ragged(out.logp, batch.sequences.response_lens), batch.sequences.trained)


def reference_sums(ref_logp: Ragged | None, trained: Ragged) -> Tensor:
    """(B,) logprobs of whole answers under the reference.  Raises ShapeError where the batch has none."""
    if ref_logp is None:
        raise ShapeError(
            "the answers have no reference logprobs yet", fix="add them with batch.adding(ref_logp=...) first"
        )
    return response_sums(ref_logp, trained)


def labelled_terms(kto: KTOSettings, logp_B: Tensor, batch: Labelled, shift_B: Tensor | None) -> UnpairedTerms:
    """The loss of each answer.  Raises ShapeError for BCO without its reward shift."""
    logratio_B = logp_B - reference_sums(batch.ref_logp, batch.sequences.trained).to(logp_B)
    desirable_B = batch.desirable.to(logp_B.device)
    if kto.loss != "bco":
        return apo_zero_unpaired_loss(logratio_B, desirable_B, kto.beta, kto.desirable_weight, kto.undesirable_weight)
    if shift_B is None:
        raise ShapeError("the answers have no reward shift yet", fix="`advantages` adds it")
    return bco_loss(logratio_B, desirable_B, shift_B.to(logp_B), kto.beta)


def implicit_rewards(batch: Labelled, beta: float) -> Tensor:
    """(B,) beta (log pi_old - log ref) of whole answers.  Raises ShapeError where a column is missing."""
    if batch.old_logp is None:
        raise ShapeError("the answers have no logprobs of the policy yet", fix="`collect` adds them")
    trained = batch.sequences.trained
    return beta * (response_sums(batch.old_logp, trained) - reference_sums(batch.ref_logp, trained))


def answer_stats(terms: UnpairedTerms, logp_B: Tensor, desirable_B: Tensor) -> Stats:
    """Means over the desirable (chosen) and the undesirable (rejected) answers; a kind without answers has none."""
    stats: Stats = {}
    for name, mask_B in (("chosen", desirable_B), ("rejected", ~desirable_B)):
        if bool(mask_B.any()):
            stats[f"rewards/{name}"] = Stat.of(terms.reward, mask_B)
            stats[f"logps/{name}"] = Stat.of(logp_B, mask_B)
    return stats


def told_apart(reward_B: Tensor, desirable_B: Tensor) -> Stats:
    """Of a whole set with answers of both kinds: the gap of their mean rewards, and the area under the ROC curve."""
    accuracy = rank_accuracy(reward_B, desirable_B)
    if accuracy is None:
        return {}
    gap = reward_B[desirable_B].double().mean() - reward_B[~desirable_B].double().mean()
    return {"rewards/margins": Stat(float(gap), 1), "accuracy": Stat(accuracy, 1)}
