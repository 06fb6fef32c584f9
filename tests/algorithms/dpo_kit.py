"""Pairs, recipes and engines that the tests of preference losses share; its functions run in processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

import engine_kit
import ranks_kit

from tutelage.algorithms.preference import preference_loss
from tutelage.config.dpo import NEEDS_SMOOTHING, DPOConfig, has_reference
from tutelage.engines.engine import ModelEngine
from tutelage.engines.ranks import MeshRanks
from tutelage.types import Pairs, Ragged


def config(**settings: Any) -> DPOConfig:
    return DPOConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "dpo": settings})


def settings_for(name: str, **more: Any) -> dict[str, Any]:
    """A recipe's section for a loss, with the smoothing that it needs."""
    return {"loss": name, "beta": 0.3, **({"label_smoothing": 0.1} if name in NEEDS_SMOOTHING else {}), **more}


def pairs(settings: dict[str, Any]) -> Pairs:
    """Five pairs of several lengths, some tokens not trained; with made-up reference logprobs where they are read."""
    batch = engine_kit.pairs()
    random = torch.Generator().manual_seed(5)
    for side in (batch.chosen, batch.rejected):
        holes = torch.rand(len(side.trained.flat), generator=random) < 0.2
        holes[side.trained.offsets()[:-1]] = False
        side.trained.flat[holes] = False
    if not has_reference(config(**settings).dpo):
        return batch
    lens = batch.sequences.response_lens
    return batch.adding(ref_logp=Ragged(-3 - 3 * torch.rand(int(lens.sum()), generator=random), lens))


def engine(folder: Path, budget: int, ranks: MeshRanks | None = None) -> ModelEngine:
    from tutelage.config.common import ModelConfig, OptimConfig
    from tutelage.models.load import load_causal_lm

    model = load_causal_lm(ModelConfig(path=str(folder)), sharding=None if ranks is None else ranks.sharding())
    return ModelEngine(model, OptimConfig(lr=1e-2, schedule="constant"), tokens_per_micro_batch=budget, ranks=ranks)


def split_gradients(rank: int, world: int, folder: Path, recipes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gradients and statistics of each recipe's loss, on shards of the mini-batch."""
    from tutelage.layout import Layout

    made = engine(folder, 30, ranks_kit.mesh_ranks(Layout(shard=world)))
    found = []
    for settings in recipes:
        batch, loss = pairs(settings), preference_loss(config(**settings).dpo)
        stats = made.evaluate(batch, loss)
        found.append({"gradients": made.gradients(batch, loss), "stats": {n: s.mean for n, s in stats.items()}})
    return found


def followed_weights(rank: int, world: int, folder: Path, alpha: float, saved: Path) -> dict[str, Any]:
    """A sharded snapshot that follows the weights times two; what it is then, and after a way through a file."""
    from tutelage.engines.following import FollowingWeights
    from tutelage.layout import Layout

    made = engine(folder, 100, ranks_kit.mesh_ranks(Layout(shard=world)))
    copied = made.snapshot()
    following = FollowingWeights(copied)
    doubled = {name: 2 * tensor.detach().clone() for name, tensor in made.named_weights()}
    moved = following.follow(doubled, alpha)
    following.save(saved)
    fresh = FollowingWeights(made.snapshot())
    fresh.load(saved)
    return {
        "moved": moved,
        "followed": {name: tensor.clone() for name, tensor in copied.named_weights()},
        "loaded": {name: tensor.clone() for name, tensor in fresh.engine.named_weights()},
        "start": {name: tensor.clone() for name, tensor in made.named_weights()},
        "logprobs": fresh.engine.logprobs(engine_kit.sequences(), 1.0).flat,
    }
