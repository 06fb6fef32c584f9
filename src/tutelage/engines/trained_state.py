"""What a step depends on, of one model: its trained weights in float32 and the moments of its optimiser.

On many ranks each has its parts, on pipeline stages its blocks; a copy or a saved state is of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.engines.optim import load_moments, moments
from tutelage.engines.saved import SavedTensors
from tutelage.errors import CheckpointError
from tutelage.models.forward import Model
from tutelage.models.parallel.stages import Stages
from tutelage.models.quantize import dense_shape
from tutelage.models.sharding import local, whole

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class TrainedState:
    """optimizer  None: the model is frozen.  stages: of the pipeline; None: the blocks are not cut into any.

    trained, every  shapes of the trained weights, and of all of them, on every stage.
    """

    model: Model
    optimizer: torch.optim.AdamW | None
    stages: Stages | None
    trained: Shapes
    every: Shapes

    @classmethod
    def of(cls, model: Model, optimizer: torch.optim.AdamW | None, stages: Stages | None) -> TrainedState:
        """Collective over the stages."""
        trained = _shapes(model.masters.masters, stages)
        return cls(model, optimizer, stages, trained, _shapes(dict(model.module.named_parameters()), stages))

    def checkpoint_bytes(self) -> int:
        """Of a saved state with its two moments, and of the exported model beside it, over all ranks."""
        trained, every = (sum(map(math.prod, shapes.values())) for shapes in (self.trained, self.every))
        return 4 * (3 * trained + every)

    def tensors(self) -> dict[str, Tensor]:
        """By path, weights/NAME and moments/NAME/KIND: themselves, of this rank."""
        masters = self.model.masters.masters
        saved = {} if self.optimizer is None else moments(self.optimizer, masters)
        weights = {f"weights/{name}": master.detach() for name, master in masters.items()}
        return weights | {f"moments/{n}/{k}": v for n, values in saved.items() for k, v in values.items()}

    def copied(self) -> dict[str, Any]:
        """Copies of them, whole: weights by name, moments by name and kind.  Collective."""
        state: dict[str, Any] = {"weights": {}, "moments": {}}
        for path, tensor in self.copies(self.tensors().items()).items():
            kind, _, name = path.partition("/")
            if kind == "weights":
                state["weights"][name] = tensor
            else:
                name, _, key = name.rpartition("/")
                state["moments"].setdefault(name, {})[key] = tensor
        return state

    def copies(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Whole, and of all pipeline stages.  Collective."""
        every: Iterable[tuple[str, Tensor]] = ((name, whole(tensor)) for name, tensor in tensors)
        if self.stages is not None:
            every = self.stages.stream(every)
        return {name: tensor.detach().clone() for name, tensor in every}

    def read(self, folder: Path) -> dict[str, Any]:
        """This rank's parts of a saved state.

        Raises CheckpointError for another model or other trained layers, and for a file that is damaged or missing.
        """
        masters = self.model.masters.masters
        held = SavedTensors.open(folder)
        shapes = {name.removeprefix("weights/"): held.shape(name) for name in held.names("weights/")}
        _require_fit(shapes, self.trained)
        found: dict[str, dict[str, Tensor]] = {}
        for path in held.names("moments/"):
            name, _, key = path.removeprefix("moments/").rpartition("/")
            _require_fit({} if name in self.trained else {name: None}, {})
            if name not in masters:
                continue
            like = torch.zeros(()) if key == "step" else masters[name].detach()
            _require_fit({name: held.shape(path)}, {name: tuple(like.shape)})
            found.setdefault(name, {})[key] = held.read(path, like)
        weights = {name: held.read(f"weights/{name}", master.detach()) for name, master in masters.items()}
        return {"updates": 0, **held.plain, "weights": weights, "moments": found}

    def load(self, state: Mapping[str, Any]) -> None:
        """From `read`, or on one rank from `copied`.  Raises CheckpointError, with the weights untouched, as `read`."""
        masters = self.model.masters.masters
        weights, saved = state.get("weights", {}), state.get("moments", {})
        _require_fit({n: w.shape for n, w in weights.items()}, {n: local(m).shape for n, m in masters.items()})
        _require_fit(dict.fromkeys(set(saved) - set(masters)), {})
        self.model.masters.load(weights)
        if self.optimizer is not None:
            load_moments(self.optimizer, masters, saved)


def _shapes(named: Mapping[str, Tensor], stages: Stages | None) -> Shapes:
    """Of these weights, and of those of the other pipeline stages."""
    own = {name: dense_shape(tensor) for name, tensor in named.items()}
    return own if stages is None else {name: tuple(shape) for name, shape in stages.union(own).items()}


def _require_fit(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless names and shapes are the same."""
    strange = sorted(set(saved) ^ set(own)) or [name for name, shape in own.items() if saved[name] != shape]
    if strange:
        raise CheckpointError(
            f"the saved state does not fit the model: {len(strange)} weights differ, first {strange[:1]}",
            fix="resume with the model, LoRA and train_layers settings that the run began with",
        )
