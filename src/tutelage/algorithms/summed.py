"""Several separable losses of one model as one.   Shapes: B items of the mini-batch, N loss items.

    L = sum_k sum_i w_i l_ki = sum_i w_i sum_k l_ki

The parts weigh their items alike, so the losses of an item are added before they are weighed, and one backward pass
gives the gradient of all.  A statistic of part NAME is called NAME/... (`schedules.training.merged_by_role`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import ConfigError
from tutelage.protocols import CoupledLoss, NoisyLoss, SeparableLoss
from tutelage.types import Outputs, Ragged, Stats

OWN = "set critic.trunk to own"


@dataclass(frozen=True)
class SummedLoss:
    """parts: role -> its loss.

    Raises ConfigError for a coupled part, for one with noise on the embeddings, and where the parts weigh differently.
    """

    parts: Mapping[str, SeparableLoss]

    def __post_init__(self) -> None:
        for name, loss in self.parts.items():
            if isinstance(loss, CoupledLoss):
                raise ConfigError(
                    f"the loss of {name} ({type(loss).__name__}) is one of the whole mini-batch, and is not added to "
                    "another token by token",
                    fix=OWN,
                )
            if isinstance(loss, NoisyLoss):
                raise ConfigError(
                    f"the loss of {name} ({type(loss).__name__}) has noise on the embeddings, which every loss of the "
                    "same pass would read",
                    fix=OWN,
                )

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset[str]().union(*(loss.outputs for loss in self.parts.values()))

    def weights(self, batch: Any) -> Ragged:
        (first, one), *others = ((name, loss.weights(batch)) for name, loss in self.parts.items())
        for name, other in others:
            if not (torch.equal(one.lens, other.lens) and torch.equal(one.flat, other.flat)):
                raise ConfigError(
                    f"the losses of {first} and {name} weigh the tokens of a mini-batch differently", fix=OWN
                )
        return one

    def items(self, out: Outputs, batch: Any) -> tuple[Tensor, Stats]:
        found = {name: loss.items(out, batch) for name, loss in self.parts.items()}
        total_N = torch.stack([items_N.float() for items_N, _ in found.values()]).sum(0)
        return total_N, {f"{name}/{key}": stat for name, (_, own) in found.items() for key, stat in own.items()}
