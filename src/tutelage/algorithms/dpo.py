"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290): a policy from preference pairs, no reward.

Shapes: P pairs, R flat response tokens of the 2P sequences (all chosen, then all rejected).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.config.dpo import DPOConfig
from tutelage.errors import ShapeError
from tutelage.math.preference_loss import dpo_loss
from tutelage.math.reward_loss import pair_accuracy
from tutelage.types import Outputs, Pairs, Ragged, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "reference")
PREFIXES = {"actor": "dpo"}
PUBLISHED: tuple[str, ...] = ()


@dataclass(frozen=True)
class DPOState:
    step: int

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}


def initial_state(cfg: DPOConfig) -> DPOState:
    return DPOState(0)


def state_from(saved: Mapping[str, Any]) -> DPOState:
    return DPOState(saved["step"])


def collect(batch: Any, roles: Any, cfg: DPOConfig) -> Any:
    """The data with the reference's logprobs of both answers."""
    return batch.adding(ref_logp=roles.reference.logprobs(batch))


def advantages(batch: Pairs, state: DPOState, cfg: DPOConfig) -> tuple[Pairs, DPOState, Stats]:
    tokens = float(batch.sequences.trained.flat.sum())
    return batch, DPOState(state.step + 1), {"data/pairs": Stat(len(batch), 1), "data/trained_tokens": Stat(tokens, 1)}


def learn(batch: Any, roles: Any, cfg: DPOConfig, state: DPOState) -> list[dict[str, Any]]:
    return [roles.update(batch, actor=DPOLoss.of(cfg))]


@dataclass(frozen=True)
class DPOLoss:
    """Mean over pairs of the sigmoid loss; an item is a pair."""

    beta: float
    label_smoothing: float

    @classmethod
    def of(cls, cfg: DPOConfig) -> DPOLoss:
        return cls(cfg.dpo.beta, cfg.dpo.label_smoothing)

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp"})

    def weights(self, batch: Pairs) -> Ragged:
        one = torch.ones(len(batch), dtype=torch.int64)
        return Ragged(torch.full((len(batch),), 1.0 / len(batch)), one)

    def items(self, out: Outputs, batch: Pairs) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        if batch.ref_chosen_logp is None or batch.ref_rejected_logp is None:
            raise ShapeError(
                "the pairs have no reference logprobs yet", fix="add them with pairs.adding(ref_logp=...) first"
            )
        chosen, rejected = batch.sides(Ragged(out.logp, batch.sequences.response_lens))
        chosen_P, rejected_P = (
            response_sums(chosen, batch.chosen.trained),
            response_sums(rejected, batch.rejected.trained),
        )
        terms = dpo_loss(
            chosen_P,
            rejected_P,
            response_sums(batch.ref_chosen_logp, batch.chosen.trained),
            response_sums(batch.ref_rejected_logp, batch.rejected.trained),
            self.beta,
            self.label_smoothing,
        )
        return terms.loss, {
            "accuracy": Stat.of(pair_accuracy(terms.reward_chosen, terms.reward_rejected)),
            "margin": Stat.of(terms.reward_chosen - terms.reward_rejected),
            "reward_chosen": Stat.of(terms.reward_chosen),
            "reward_rejected": Stat.of(terms.reward_rejected),
            "logp_chosen": Stat.of(chosen_P),
            "logp_rejected": Stat.of(rejected_P),
        }


def response_sums(logp: Ragged, trained: Ragged) -> Tensor:
    """(P,) sum of a column over the trained tokens of each row; what lies under mask 0 is never read."""
    rows = torch.repeat_interleave(torch.arange(len(logp), device=logp.flat.device), logp.lens.to(logp.flat.device))
    kept = torch.where(trained.flat.to(logp.flat.device), logp.flat, 0.0)
    return kept.new_zeros(len(logp)).index_add(0, rows, kept)
