"""Supervised fine-tuning: maximum likelihood of the marked tokens.   Shapes: B sequences, R flat response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.config.sft import SFTConfig
from tutelage.math.keyed import sample_key
from tutelage.math.masking import aggregation_weights
from tutelage.math.supervised_loss import supervised_loss
from tutelage.types import Demonstrations, Outputs, Ragged, Stat, Stats

ROLES: tuple[str, ...] = ("actor",)
PREFIXES = {"actor": "sft"}
PUBLISHED: tuple[str, ...] = ()


@dataclass(frozen=True)
class SFTState:
    step: int

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}


def initial_state(cfg: SFTConfig) -> SFTState:
    return SFTState(0)


def state_from(saved: Mapping[str, Any]) -> SFTState:
    return SFTState(saved["step"])


def collect(batch: Any, roles: Any, cfg: SFTConfig) -> Any:
    """The data is the batch."""
    return batch


def advantages(batch: Demonstrations, state: SFTState, cfg: SFTConfig) -> tuple[Demonstrations, SFTState, Stats]:
    tokens = float(batch.sequences.trained.flat.sum())
    return batch, SFTState(state.step + 1), {"data/trained_tokens": Stat(tokens, 1)}


def learn(batch: Any, roles: Any, cfg: SFTConfig, state: SFTState) -> list[dict[str, Any]]:
    return [roles.update(batch, actor=SFTLoss.of(cfg, state.step))]


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood or DFT; an item is a token, weighted by the aggregation over the trained tokens.

    noise_alpha  of the noise on the embeddings while training, keyed by (seed, step, row); None: no noise.
    """

    aggregation: str
    kind: str = "nll"
    noise_alpha: float | None = None
    seed: int = 0
    step: int = 0

    @classmethod
    def of(cls, cfg: SFTConfig, step: int = 0) -> SFTLoss:
        return cls(cfg.sft.aggregation, cfg.sft.loss, cfg.sft.neftune_alpha, cfg.seed, step)

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp"})

    def weights(self, batch: Demonstrations) -> Ragged:
        trained = batch.sequences.trained
        return Ragged.from_padded(aggregation_weights(trained.padded(), self.aggregation), trained.lens)

    def items(self, out: Outputs, batch: Demonstrations) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        trained = batch.sequences.trained.flat
        stats = {"nll": Stat.of(-out.logp, trained), "probability": Stat.of(out.logp.detach().exp(), trained)}
        return supervised_loss(self.kind, out.logp), stats

    def noise_keys(self, batch: Demonstrations) -> Tensor:
        """(B,) what keys the noise of each row."""
        keys = [sample_key(self.seed, self.step, name, 0, "neftune") for name in batch.ids]
        return torch.tensor(keys, dtype=torch.int64)
