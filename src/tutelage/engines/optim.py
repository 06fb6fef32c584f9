"""The optimiser of an engine: AdamW without decay on biases and norms, and learning rates by update count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tutelage.config.common import OptimConfig
from tutelage.errors import TrainingError
from tutelage.models.sharding import by_mesh, placed

BETAS = (0.9, 0.999)
FUSED_ON = frozenset({"cpu", "cuda"})
"""Devices where torch updates a weight and its moments in one kernel."""


def learning_rate(cfg: OptimConfig, update: int, total: int) -> float:
    """The rate of update `update`, counted from 0, of `total`; W = warmup_steps.

    Warm-up: lr (u + 1) / (W + 1) for u < W.  Then, with x = (u - W) / (total - W) in [0, 1):

        linear    lr (1 - x)          cosine    lr (1 + cos(pi x)) / 2          constant    lr

    The first update after the warm-up has the peak rate; the last has lr / (total - W) (linear), never 0.
    Raises TrainingError for an update past the end of a decaying schedule, whose rate would be 0.
    """
    if update < cfg.warmup_steps:
        return cfg.lr * (update + 1) / (cfg.warmup_steps + 1)
    if cfg.schedule == "constant":
        return cfg.lr
    if update >= total:
        raise TrainingError(
            f"update {update + 1} of a {cfg.schedule} learning-rate schedule of {total} updates: its rate would be 0",
            fix="give the engine the number of updates of the run, or set optim.schedule to constant",
        )
    x = (update - cfg.warmup_steps) / (total - cfg.warmup_steps)
    return cfg.lr * (1.0 - x) if cfg.schedule == "linear" else cfg.lr * 0.5 * (1.0 + math.cos(math.pi * x))


def make_optimizer(cfg: OptimConfig, masters: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over the master weights; vectors (biases, norms) are not decayed.

    Weights that are spread over different meshes are in groups of their own: torch updates a group in one operation.
    Each weight is read and written once and nothing of its size is made besides, where one kernel does it all (fused).
    """
    groups = []
    for decay, chosen in (
        (cfg.weight_decay, [p for p in masters.values() if p.ndim >= 2]),
        (0.0, [p for p in masters.values() if p.ndim < 2]),
    ):
        groups += [{"params": same, "weight_decay": decay} for same in by_mesh(chosen)]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=BETAS, eps=cfg.eps, **_kernel(masters.values()))


def _kernel(weights: Iterable[Tensor]) -> dict[str, bool]:
    """How torch is to run the update: in one kernel where it has one, else as torch itself chooses."""
    fused = all(x.dtype == torch.float32 and x.device.type in FUSED_ON for x in weights)
    return {"fused": True} if fused else {}


def moments(optimizer: torch.optim.AdamW, masters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
    """name -> {"exp_avg", "exp_avg_sq", "step"}; empty before the first update."""
    return {name: dict(optimizer.state[p]) for name, p in masters.items() if p in optimizer.state}


def load_moments(
    optimizer: torch.optim.AdamW, masters: Mapping[str, nn.Parameter], saved: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Put saved moments back, by name, of sharded weights this rank's part; parameters without any start anew."""
    optimizer.state.clear()
    for name, values in saved.items():
        parameter = masters[name]
        optimizer.state[parameter] = {
            key: _count(value, parameter, optimizer)
            if key == "step"
            else placed(value.to(parameter.device, copy=True), parameter)
            for key, value in values.items()
        }


def _count(saved: Tensor, parameter: Tensor, optimizer: torch.optim.AdamW) -> Tensor:
    """The number of updates, a copy: a fused kernel reads it where the weight is, any other on the host."""
    return saved.to(parameter.device if optimizer.defaults["fused"] else "cpu", copy=True)
