"""Weights of a frozen engine that follow those of another one (an average over time), in float32, with their state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tutelage.engines.engine import ModelEngine
from tutelage.engines.passes import problem_of
from tutelage.engines.saved import SavedTensors, save_tensors
from tutelage.errors import CheckpointError, ModelError
from tutelage.models.sharding import local, place, placed


class FollowingWeights:
    """The weights of a frozen engine, kept in float32 beside a computing copy of lower precision.

    `follow`, `save` and `load` are collective over the ranks that hold the model.
    """

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine
        self.own = dict(engine.model.module.named_parameters())
        self.wide = {name: local(weight).detach().float() for name, weight in self.own.items()}
        # float() of a float32 tensor is that tensor: there the average and what computes are one

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor], alpha: float) -> float:
        """own <- alpha * weights + (1 - alpha) * own; the root mean square of the change over all weights.

        weights: whole tensors by their names in a checkpoint.  Raises ModelError, on every rank and with every weight
        untouched, for one that is missing or has another shape.
        """
        self.engine.ranks.agree(problem_of(lambda: self._require_fit(weights)))
        moved, count = 0.0, 0
        for name, wide in self.wide.items():
            shape, offset = place(self.own[name])
            block = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            change = alpha * (weights[name][block].to(wide) - wide)
            wide.add_(change)
            moved, count = moved + float(change.double().square().sum()), count + change.numel()
        self._publish()
        everywhere = self.engine.ranks.from_all([moved, count])
        return (sum(square for square, _ in everywhere) / max(sum(size for _, size in everywhere), 1)) ** 0.5

    def _require_fit(self, weights: Mapping[str, Tensor]) -> None:
        for name, own in self.own.items():
            if name not in weights or tuple(weights[name].shape) != tuple(own.shape):
                seen = tuple(weights[name].shape) if name in weights else "nothing"
                raise ModelError(
                    f"the reference has {name} of shape {tuple(own.shape)}, the policy {seen}",
                    fix="start both from the same folder, without LoRA",
                )

    def _publish(self) -> None:
        for name, wide in self.wide.items():
            local(self.own[name]).copy_(wide)

    def save(self, folder: Path) -> None:
        tensors = {name: placed(wide, self.own[name]) for name, wide in self.wide.items()}
        save_tensors(folder, tensors, {}, self.engine.ranks)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Raises CheckpointError, on every rank and with the weights untouched, for another model."""
        read: dict[str, Tensor] = {}
        self.engine.ranks.agree(problem_of(lambda: read.update(self._read(folder))))
        for name, wide in self.wide.items():
            wide.copy_(read[name])
        self._publish()

    def _read(self, folder: Path) -> dict[str, Tensor]:
        held = SavedTensors.open(folder)
        for name, own in self.own.items():
            if name not in held.tensors or held.shape(name) != tuple(own.shape):
                raise CheckpointError(
                    f"the saved reference does not fit the model: {name}",
                    fix="resume with the model the run began with",
                )
        return {name: held.read(name, placed(wide, self.own[name])) for name, wide in self.wide.items()}

    def bytes(self) -> int:
        """Of a saved state, over all ranks."""
        return 4 * sum(own.numel() for own in self.own.values())
