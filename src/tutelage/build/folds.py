"""Grouped cross-validation of a reward model: every pair is judged once, by a model that never saw its prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from tutelage import runfolder
from tutelage.algorithms import algorithm_of
from tutelage.build.data import StageData, training_source
from tutelage.build.device import device
from tutelage.build.kit import Kit
from tutelage.build.roles import learning_reward
from tutelage.build.stages import build_stage
from tutelage.config import RewardModelConfig
from tutelage.data.splits import grouped_folds
from tutelage.layout import Place
from tutelage.math.reward_loss import pair_accuracy
from tutelage.math.stats import wilson_interval
from tutelage.models.features import FeatureCache
from tutelage.reports.display import make_display
from tutelage.reports.metrics_log import MetricsLog
from tutelage.runfolder import write_jsonl
from tutelage.schedules import Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Pairs


def cross_validate(
    cfg: RewardModelConfig, data: StageData, folder: Path, display: str, stream: TextIO | None = None
) -> dict[str, Any]:
    """Train `folds` models; accuracy over all pairs with its 95 % Wilson interval, and per fold."""
    pairs, groups = everything(data)
    folds = grouped_folds(groups, cfg.reward_model.folds, cfg.seed)
    log, show = MetricsLog(folder), make_display(display, len(folds), f"{cfg.name}: folds", stream=stream)
    for line in data.prepared.preflight.lines():
        show.event("data", line)
    show.start()
    results: list[dict[str, Any]] = []
    judged: list[dict[str, Any]] = []
    features = FeatureCache()
    try:
        for number, held_out in enumerate(folds, start=1):
            rest = torch.cat([f for f in folds if f is not held_out])
            train, held = pairs.select(rest), pairs.select(held_out)
            chosen, rejected = fold_scores(cfg, data, train, held, features, show.phase)
            correct = pair_accuracy(chosen, rejected)
            result = {"fold": number, "pairs": len(held), "correct": float(correct.sum())}
            results.append({**result, "accuracy": float(correct.mean())})
            judged += predictions(number, held, [groups[i] for i in held_out.tolist()], chosen, rejected)
            write_jsonl(folder / "predictions.jsonl", judged)
            log.log(number, {"eval/accuracy": results[-1]["accuracy"], "eval/pairs": len(held)})
            show.step(number, {"eval/accuracy": results[-1]["accuracy"]})
    finally:
        show.close()
        log.close()
    summary = {"run": str(folder), "folds": results, **overall(results)}
    runfolder.write_json(folder / "summary.json", summary)
    show.finish(summary)
    return summary


def everything(data: StageData) -> tuple[Pairs, list[str]]:
    """All pairs again, with the group of each."""
    prepared = data.prepared
    if prepared.eval is None:
        return prepared.train, prepared.groups
    return Pairs.concat([prepared.train, prepared.eval]), [*prepared.groups, *prepared.eval_groups]


def fold_scores(
    cfg: RewardModelConfig, data: StageData, train: Pairs, held_out: Pairs, features: FeatureCache, progress: Any
) -> tuple[Tensor, Tensor]:
    """(pairs,) scores of chosen and rejected, by a model trained on the rest from the same initial weights."""
    torch.manual_seed(cfg.seed)
    inside = replace(data, prepared=replace(data.prepared, train=train, eval=held_out))
    facts = build_stage(cfg, inside).builder.facts
    transport = LocalTransport()
    role = learning_reward(Kit(facts, ("reward",), Place(device=device())), features)
    roles = RoleSet({"reward": transport.handle("reward", role)})
    algorithm = algorithm_of(cfg)
    schedule, state = Synchronous(algorithm, transport, roles, cfg), algorithm.initial_state(cfg)
    source, steps = training_source(cfg, len(train))
    for done, index in enumerate(source):
        if done >= steps:
            break
        state = schedule.step(train.select(index), state).state
        progress("updates", done + 1, steps)
    return roles.reward.scores(held_out.chosen).gather(), roles.reward.scores(held_out.rejected).gather()


def predictions(
    fold: int, held_out: Pairs, groups: list[str], chosen: Tensor, rejected: Tensor
) -> list[dict[str, Any]]:
    """predictions.jsonl: what the model that never saw a pair said about it."""
    rows = zip(held_out.ids, groups, chosen.tolist(), rejected.tolist(), strict=True)
    return [{"fold": fold, "id": i, "group": g, "chosen": c, "rejected": r} for i, g, c, r in rows]


def overall(results: list[dict[str, Any]]) -> dict[str, Any]:
    pairs, correct = sum(r["pairs"] for r in results), sum(r["correct"] for r in results)
    accuracy, low, high = wilson_interval(correct, pairs)
    return {"pairs": pairs, "accuracy": {"mean": accuracy, "low": low, "high": high}}
