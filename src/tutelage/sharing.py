"""One data rank's part of a global mini-batch, with the loss weights of the whole.

Shapes: B items of the mini-batch, b items of the part.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.protocols import CoupledLoss, Loss
from tutelage.types import Ragged


@dataclass(frozen=True, eq=False)
class Share:
    """rows     the items of this rank, at least one; a rank without work has one filler item.
    index    (b,) int64: where each item is in the mini-batch; -1 for a filler, which counts nowhere.
    weights  Ragged: the items' weights of a separable loss, of the whole mini-batch; 0 for a filler.  None: coupled.
    whole    of a coupled loss: the mini-batch itself, which `couple` reads.  None: separable.
    """

    rows: Any
    index: Tensor
    weights: Ragged | None
    whole: Any | None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def filler(self) -> bool:
        """Whether this rank has no item of its own."""
        return bool((self.index < 0).all())

    def item_tokens(self) -> Tensor:
        return self.rows.item_tokens()


def shares(batch: Any, loss: Loss, count: int) -> list[Share]:
    """The mini-batch cut into `count` shares of near-equal tokens; any count, no divisibility.

    Separable weights are computed here, once, on the whole mini-batch: summed over shares, the loss and its gradient
    are those of one rank.
    """
    coupled = isinstance(loss, CoupledLoss)
    weights = None if coupled else loss.weights(batch)  # type: ignore[union-attr]
    whole = batch if coupled else None
    return [_share(batch, index, weights, whole) for index in balanced(batch.item_tokens(), count)]


def whole_share(batch: Any, loss: Loss) -> Share:
    """The one share of an unsplit mini-batch, in its order."""
    index_B = torch.arange(len(batch))
    if isinstance(loss, CoupledLoss):
        return Share(batch, index_B, None, batch)
    return Share(batch, index_B, loss.weights(batch), None)


def _share(batch: Any, index_b: Tensor, weights: Ragged | None, whole: Any | None) -> Share:
    if len(index_b):
        return Share(batch.select(index_b), index_b, None if weights is None else weights.select(index_b), whole)
    first = torch.zeros(1, dtype=torch.int64)
    idle = None if weights is None else weights.select(first)
    if idle is not None:
        idle = idle.with_flat(torch.zeros_like(idle.flat))
    return Share(batch.select(first), torch.tensor([-1]), idle, whole)


def balanced(tokens_B: Tensor, count: int) -> list[Tensor]:
    """`count` index tensors, each increasing, together 0..B-1: the longest item goes to the part with fewest tokens.

    (Longest processing time first, Graham 1969: the fullest part is within 4/3 of the best possible.)  Parts may be
    empty where there are fewer items than parts.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    least = [(0, 0, part) for part in range(count)]  # (tokens, items, part): a heap
    order_B = torch.argsort(tokens_B, descending=True, stable=True)
    for item, tokens in zip(order_B.tolist(), tokens_B[order_B].tolist(), strict=True):
        load, items, part = least[0]
        parts[part].append(item)
        heapq.heapreplace(least, (load + tokens, items + 1, part))
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in parts]
