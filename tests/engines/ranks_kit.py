"""Engines of several ranks beside the one-process engine that is their oracle; run by `spmd_kit.run_ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_kit as kit
import torch

from tutelage.config.common import ModelConfig
from tutelage.engines.engine import ModelEngine
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import MeshRanks
from tutelage.layout import Layout
from tutelage.models.load import load_causal_lm, load_scalar_model

LAYOUTS = {
    "replicate 2": Layout(replicate=2),
    "shard 2": Layout(shard=2),
    "shard 4": Layout(shard=4),
    "hsdp 2x2": Layout(replicate=2, shard=2),
}
MESHES = RankMeshes()


def mesh_ranks(layout: Layout, **settings: Any) -> MeshRanks:
    return MeshRanks(MESHES.of(layout), **settings)


def policy(folder: Path, layout: Layout | None, settings: dict | None = None, **changes: Any) -> ModelEngine:
    """layout None: one process."""
    keys = {"total_updates", "temperature", "tokens_per_micro_batch", "train_layers"}
    own = {k: v for k, v in changes.items() if k in keys}
    ranks = None if layout is None else mesh_ranks(layout, sum_once=changes.pop("sum_once", False))
    cfg = kit.optim(**{k: v for k, v in changes.items() if k not in keys})
    sharding = None if ranks is None else ranks.sharding()
    model = load_causal_lm(ModelConfig(path=str(folder), **(settings or {})), sharding=sharding)
    return ModelEngine(model, cfg, ranks=ranks, **own)


def scalar(folder: Path, kind: str, layout: Layout | None, settings: dict | None = None, **own: Any) -> ModelEngine:
    ranks = None if layout is None else mesh_ranks(layout)
    sharding = None if ranks is None else ranks.sharding()
    model = load_scalar_model(ModelConfig(path=str(folder), **(settings or {})), kind, sharding=sharding)
    return ModelEngine(model, kit.optim(), ranks=ranks, **own)


def make(case: str, folder: Path, layout: Layout | None, settings: dict | None = None, **changes: Any) -> tuple:
    """(engine, batch, loss)"""
    if case == "tokens":
        return policy(folder, layout, settings, **changes), kit.batch(), kit.TokenLoss()
    if case == "sorted":
        return policy(folder, layout, settings, **changes), kit.batch(), kit.SortedLoss()
    if case == "values":
        return scalar(folder, "value", layout, settings, **changes), kit.batch(), kit.ValueLoss()
    return scalar(folder, "reward", layout, settings, **changes), kit.pairs(), kit.PairLoss()


def two_steps(case: str, folder: Path, layout: Layout | None, settings: dict | None = None, **changes: Any) -> dict:
    """The gradient, the statistics of two updates, and the weights after them."""
    engine, batch, loss = make(case, folder, layout, settings, **changes)
    gradients = engine.gradients(batch, loss)
    before = engine.evaluate(batch, loss)
    stats = [engine.step(batch, loss) for _ in range(2)]
    return {"gradients": gradients, "before": before, "stats": stats, "weights": engine.state()["weights"]}


def on_rank(rank: int, world: int, case: str, folder: Path, layout: str, settings: dict | None, changes: dict) -> dict:
    torch.manual_seed(rank)
    return two_steps(case, folder, LAYOUTS[layout], settings, **changes)
