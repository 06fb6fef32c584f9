"""An in-process engine on weights of its own, which are replaced by whole tensors from a trainer elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tutelage.errors import RolloutError, closest
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.types import Prompts, Rollout


class ReceivingInProcess:
    """rollout generates with `model`; `load_weights` takes every weight by its name in a checkpoint."""

    def __init__(self, rollout: InProcessRollout, model: nn.Module) -> None:
        self.rollout = rollout
        self.model = model

    def generate(self, prompts: Prompts) -> Rollout:
        return self.rollout.generate(prompts)

    @torch.no_grad()
    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Raises RolloutError for an unknown name, another shape, and weights that do not come."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        wanted = {id(parameter) for parameter in own.values()}
        for name, tensor in named:
            if name not in own or own[name].shape != tensor.shape:
                what = f"has no weight {name!r}.{closest(name, own)}" if name not in own else f"has {name} otherwise"
                raise RolloutError(
                    f"the generator's model {what}, published: {tuple(tensor.shape)}",
                    fix="start the generator from the policy's own folder",
                )
            own[name].copy_(tensor)
            wanted.discard(id(own[name]))
        if wanted:
            raise RolloutError(
                f"{len(wanted)} weights of the generator were not published", fix="publish every weight of the policy"
            )
        self.rollout.publish(version)

    def join(self, address: tuple[str, int], world: int, offset: int) -> None:
        raise RolloutError("the in-process engine has no wire of its own", fix="use load_weights")

    def receive(self, version: int) -> object:
        raise RolloutError("the in-process engine has no wire of its own", fix="use load_weights")
