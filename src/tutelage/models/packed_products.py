"""Products with the same matrices many times over, as decoding makes them, in bfloat16 on a CPU.

oneDNN brings a matrix into an order of its own for each product.  For few rows that is a third of a product's time,
so it is done once for all steps of a batch: as many bytes again as the matrices have, for as long as the batch lives.
Products were the same to the bit wherever that was tried; oneDNN does not promise it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn

from tutelage.models.thin_products import FEWEST_INPUTS, forwards_in_place, is_plain_linear
from tutelage.native.build import switch

FEWEST_STEPS = 32
"""Of a response: with fewer, ordering the matrices may cost more than it saves."""
MOST_BYTES = 4 << 30
"""Of all copies together: a larger model has none."""
MOST_ROWS = 256
"""For more, the order of each product costs little beside it."""


class PackedLayers:
    """The linear layers of a model that may multiply with ordered copies: plain, whole bfloat16 matrices on a CPU that
    nothing hangs on.  The copies are made when they are first used, and the weights must stay the same from then on.

    steps: how often each multiplies for the longest response there may be.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        found = [m for m in model.modules() if _packable(m)] if steps >= FEWEST_STEPS and _supported() else []
        self._layers = found if sum(layer.weight.nbytes for layer in found) <= MOST_BYTES else []
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Inside, without gradients, the layers multiply so."""
        if not self._forwards:
            self._forwards = {layer: _forward(layer) for layer in self._layers}
        with forwards_in_place(self._forwards):
            yield


def _supported() -> bool:
    """Whether this build of torch has the operators, this processor the products, and TUTELAGE_KERNELS is not off."""
    if switch() == "off":
        return False
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    return is_plain_linear(module, torch.bfloat16) and module.weight.shape[1] >= FEWEST_INPUTS


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), MOST_ROWS)

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        other = x.dtype != torch.bfloat16 or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        if other or rows > MOST_ROWS:
            return nn.functional.linear(x, layer.weight, layer.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, "none", [], "")
        return out

    return forward
