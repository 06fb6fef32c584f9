"""Products of few rows with a large matrix, as decoding makes them, on a CPU.

Shapes: b rows, I inputs, O outputs, K outputs of a block.

A CPU's library cuts x W^T over threads for tall x, and with few rows its threads wait for each other.  As a batch of
products with blocks of K rows of W, each of which is one thread's, it is up to twice as fast (docs/decisions.md):

    y_bO = [x W_1^T, x W_2^T, ...]        W_j (K, I)

The sums over I are those of one product: only the cut over O is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn

BLOCK = 128
"""Rows of W in a block, at most."""
SMALLEST_BLOCK = 64
MOST_ROWS = 128
"""More fill the library's own blocks."""
FEWEST_INPUTS = 128
"""Of a layer: below, an adapter's for instance, there is nothing to gain."""


def thin_product(x_bI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, block: int = BLOCK) -> Tensor:
    """(b, O) x W^T + bias, contiguous; what is left over of O is a product of its own."""
    (rows, inputs), outputs = x_bI.shape, weight_OI.shape[0]
    count = outputs // block
    if count < 2 or rows > MOST_ROWS:
        return nn.functional.linear(x_bI, weight_OI, bias_O)
    whole = count * block
    blocks = weight_OI[:whole].view(count, block, inputs).transpose(1, 2)
    parts_jbK = torch.bmm(x_bI.expand(count, rows, inputs), blocks)
    if whole == outputs:
        out_bO = parts_jbK.transpose(0, 1).reshape(rows, outputs)
    else:
        out_bO = x_bI.new_empty((rows, outputs))
        out_bO[:, :whole].view(rows, count, block).copy_(parts_jbK.transpose(0, 1))
        torch.mm(x_bI, weight_OI[whole:].t(), out=out_bO[:, whole:])
    return out_bO if bias_O is None else out_bO.add_(bias_O)


class ThinLayers:
    """The linear layers of a model that may multiply in blocks: plain, whole float32 matrices on a CPU that nothing
    hangs on, of which several blocks of one size can be made.  None with one thread, where nothing is gained."""

    def __init__(self, model: nn.Module, besides: nn.Module | None = None) -> None:
        """besides: a layer that is left out, such as the output head."""
        found = [] if torch.get_num_threads() < 2 else [m for m in model.modules() if m is not besides]
        plain = [module for module in found if isinstance(module, nn.Linear)]
        blocks = {layer: block for layer in plain if (block := _block_of(layer)) is not None}
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {
            m: _forward(m, block) for m, block in blocks.items()
        }

    def __len__(self) -> int:
        return len(self._forwards)

    @contextmanager
    def in_blocks(self) -> Iterator[None]:
        """Inside, without gradients, the layers multiply so."""
        with forwards_in_place(self._forwards):
            yield


@contextmanager
def forwards_in_place(forwards: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Inside, each module computes with the function it is given; none of them has one of its own."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]


def is_plain_linear(module: nn.Module, dtype: torch.dtype) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer with a whole matrix of this type on a CPU, and nothing hangs on it."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    weight = module.weight
    plain = type(weight.data) is Tensor and weight.device.type == "cpu" and weight.dtype == dtype
    return plain and not any(hooks) and weight.is_contiguous()


def _block_of(module: nn.Linear) -> int | None:
    """The size of a layer's blocks; None where it is left as it is."""
    if not is_plain_linear(module, torch.float32) or module.weight.shape[1] < FEWEST_INPUTS:
        return None
    outputs = module.weight.shape[0]
    sizes = (size for size in range(BLOCK, SMALLEST_BLOCK - 1, -1) if outputs % size == 0)
    return next((size for size in sizes if outputs // size >= 4), None)


def _forward(layer: nn.Linear, block: int) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(x, layer.weight, layer.bias)
        rows = x.flatten(0, -2)
        return thin_product(rows, layer.weight, layer.bias, block).view(*x.shape[:-1], -1)

    return forward
