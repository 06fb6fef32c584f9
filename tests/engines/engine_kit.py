"""Tiny policies and scalar models in engines, batches, and losses that are easy to compute by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.types import Demonstrations, Outputs, Pairs, Ragged, Sequences, Stat, Stats

LENS = ((3, 4), (1, 6), (7, 1), (2, 9), (5, 2), (4, 4), (2, 3), (6, 5))


def optim(**changes: object) -> OptimConfig:
    return OptimConfig(**{"lr": 1e-2, "schedule": "constant", **changes})


def policy_engine(folder: Path, settings: dict | None = None, **changes: object) -> ModelEngine:
    keys = {"total_updates", "temperature", "tokens_per_micro_batch", "train_layers"}
    own = {k: v for k, v in changes.items() if k in keys}
    cfg = optim(**{k: v for k, v in changes.items() if k not in keys})
    return ModelEngine(load_causal_lm(ModelConfig(path=str(folder), **(settings or {}))), cfg, **own)


def scalar_engine(folder: Path, kind: str, settings: dict | None = None, **own: object) -> ModelEngine:
    model = load_scalar_model(ModelConfig(path=str(folder), **(settings or {})), kind)
    return ModelEngine(model, optim(), **own)


def sequences(seed: int = 0, lens: tuple[tuple[int, int], ...] = LENS, vocabulary: int = 90) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, vocabulary, (p + r,), generator=generator).tolist() for p, r in lens]
    return Sequences.build(
        [row[:p] for row, (p, _) in zip(rows, lens, strict=True)],
        [row[p:] for row, (p, _) in zip(rows, lens, strict=True)],
    )


def batch(seed: int = 0) -> Demonstrations:
    seqs = sequences(seed)
    return Demonstrations(seqs, tuple(str(i) for i in range(len(seqs))))


def pairs(vocabulary: int = 60) -> Pairs:
    chosen, rejected = sequences(1, LENS[:5], vocabulary), sequences(2, LENS[3:], vocabulary)
    return Pairs(chosen, rejected, torch.zeros(5), tuple("abcde"))


@dataclass(frozen=True)
class TokenLoss:
    """logp^2 + 0.1 entropy per token, weight 1 / (tokens of the mini-batch); `bad`: NaN on the last token of item 3."""

    bad: bool = False
    outputs: frozenset[str] = frozenset({"logp", "entropy"})

    def weights(self, batch: Demonstrations) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.full((int(lens.sum()),), 1.0 / int(lens.sum())), lens)

    def items(self, out: Outputs, batch: Demonstrations) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        assert out.entropy is not None
        items = out.logp.square() + 0.1 * out.entropy
        if self.bad and "3" in batch.ids:
            at = int(batch.sequences.response_lens[: batch.ids.index("3") + 1].sum()) - 1
            items = torch.where(torch.arange(len(items)) == at, float("nan"), items)
        return items, {"logp": Stat.of(out.logp)}


@dataclass(frozen=True)
class ValueLoss:
    """(V - position in the response)^2 per token, every token of weight 1 / B."""

    outputs: frozenset[str] = frozenset({"value"})

    def weights(self, batch: Demonstrations) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.full((int(lens.sum()),), 1.0 / len(lens)), lens)

    def items(self, out: Outputs, batch: Demonstrations) -> tuple[Tensor, Stats]:
        assert out.value is not None
        target = torch.cat([torch.arange(n) for n in batch.sequences.response_lens.tolist()])
        return (out.value - target).square(), {}


@dataclass(frozen=True)
class PairLoss:
    """softplus(rejected - chosen), every pair of weight 1 / P."""

    outputs: frozenset[str] = frozenset({"score"})

    def weights(self, batch: Pairs) -> Ragged:
        return Ragged(torch.full((len(batch),), 1.0 / len(batch)), torch.ones(len(batch), dtype=torch.int64))

    def items(self, out: Outputs, batch: Pairs) -> tuple[Tensor, Stats]:
        assert out.score is not None
        chosen, rejected = out.score.chunk(2)
        return torch.nn.functional.softplus(rejected - chosen), {}


@dataclass(frozen=True)
class SortedLoss:
    """Couples all items: squared gaps between neighbours of the sorted sequence logprobs, and a squared mean."""

    outputs: frozenset[str] = frozenset({"logp"})

    def scalars(self, out: Outputs, batch: Demonstrations) -> Tensor:
        assert out.logp is not None
        rows = out.logp.split(batch.sequences.response_lens.tolist())
        return torch.stack([torch.stack([row.sum(), row.mean()]) for row in rows])

    def couple(self, scalars_BK: Tensor, batch: Demonstrations) -> tuple[Tensor, Stats]:
        gaps = torch.sort(scalars_BK[:, 0]).values.diff()
        loss = gaps.square().sum() + scalars_BK[:, 1].mean().square()
        return loss, {"gap": Stat.of(gaps)}


def require_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], rel: float) -> None:
    """Same names, and |difference| <= rel |theirs| over all weights together, and nearly so for each one."""
    assert ours.keys() == theirs.keys()
    assert ours
    difference = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours) ** 0.5
    size = sum(float(theirs[n].double().square().sum()) for n in ours) ** 0.5
    assert size > 0
    assert difference <= rel * size, difference / size
    for n in ours:
        assert float((ours[n] - theirs[n]).norm()) <= 20 * rel * float(theirs[n].norm()) + rel * size, n
