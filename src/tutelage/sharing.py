"""Which items run together: one data rank's part of a mini-batch, what items cost, and even partitions.

Shapes: B items of the mini-batch, b items of the part, S sequences.

An item is one sequence or, as a pair, several.  Items whose sequences have the same prompt are a group: an engine
computes that prompt once for all of them that run together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.protocols import CoupledLoss, Loss
from tutelage.types import Ragged, Sequences

SHORTEST_PROMPT = 8
"""Tokens of a prompt that is worth sharing; one BOS token in front of every text is not."""


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

    Items with one prompt stay together where the busiest share has no more to compute for it, the prompt counted once.
    Separable weights are computed here, once, on the whole mini-batch: summed over shares, the loss and its gradient
    are those of one rank.
    """
    coupled = isinstance(loss, CoupledLoss)
    weights = None if coupled else loss.weights(batch)  # type: ignore[union-attr]
    whole = batch if coupled else None
    return [_share(batch, index, weights, whole) for index in _parts(batch, count)]


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


def _parts(batch: Any, count: int) -> list[Tensor]:
    apart = balanced(batch.item_tokens(), count)
    if count == 1 or not len(batch):
        return apart
    work = workload(batch)
    groups = work.groups()
    if len(groups) == len(batch):
        return apart
    costs = [work.cost(group) for group in groups]
    together = [
        torch.tensor(sorted(item for group in part.tolist() for item in groups[group]), dtype=torch.int64)
        for part in balanced(torch.tensor(costs, dtype=torch.float64), count)
    ]

    def busiest(parts: list[Tensor]) -> float:
        return max(work.cost(part.tolist()) for part in parts)

    return together if busiest(together) <= busiest(apart) else apart


# ---- what items cost ----


@dataclass(frozen=True, eq=False)
class Workload:
    """What B items cost where items of a group, run together, share the tokens of their prompt.

    group        number of each item's group; an item that shares nothing has a number of its own.
    shared, own  tokens of the group's prompt, and all other tokens of the item.
    shared_cost, own_cost  the same in units of one token's work outside attention.
    """

    group: list[int]
    shared: list[int]
    own: list[int]
    shared_cost: list[float]
    own_cost: list[float]

    def __len__(self) -> int:
        return len(self.group)

    @classmethod
    def of_tokens(cls, item_tokens_B: Tensor, attention: float = 0.0) -> Workload:
        """Items of one sequence each that share nothing."""
        tokens = item_tokens_B.tolist()
        nothing = [0] * len(tokens)
        return cls(
            list(range(len(tokens))), nothing, tokens, [0.0] * len(tokens), [n + attention * n * n for n in tokens]
        )

    def groups(self) -> list[list[int]]:
        """Items of each group, in the order of their first ones."""
        found: dict[int, list[int]] = {}
        for item, group in enumerate(self.group):
            found.setdefault(group, []).append(item)
        return list(found.values())

    def tokens(self, items: Iterable[int]) -> int:
        """Of these items run together."""
        held = list(items)
        prompts = {self.group[item]: self.shared[item] for item in held}
        return sum(prompts.values()) + sum(self.own[item] for item in held)

    def cost(self, items: Iterable[int]) -> float:
        """Of these items run together."""
        held = list(items)
        prompts = {self.group[item]: self.shared_cost[item] for item in held}
        return sum(prompts.values()) + sum(self.own_cost[item] for item in held)


def workload(items: Any, attention: float = 0.0, share: bool = True) -> Workload:
    """The cost of sequences, or of the items of a batch whose row s of `sequences` belongs to item s mod B.

    A sequence of n tokens costs n + c n^2, c = `attention`: n tokens of the same work outside attention, and keys that
    grow with the position.  Of p prompt and r response tokens, p + c p^2 are the prompt's and r + c (r^2 + 2 p r) the
    response's.  An item whose sequences have different prompts is counted as if it shared none of them.

    share  False: every sequence is computed by itself.
    """
    sequences = items if isinstance(items, Sequences) else items.sequences
    count = len(items)
    lens_S, prompts_S = sequences.tokens.lens.cpu(), sequences.prompt_lens.cpu()
    first_S = same_prompts(sequences) if share else torch.arange(len(lens_S))
    first_kB, lens_kB, prompts_kB = (x.view(-1, count) for x in (first_S, lens_S, prompts_S))
    one_B = (first_kB == first_kB[0]).all(dim=0)
    shared_B = torch.where(one_B, prompts_kB[0], 0)
    own_kB = lens_kB - shared_B
    shared, own = shared_B.double(), own_kB.double()
    own_cost_B = (own + attention * own * (own + 2 * shared)).sum(dim=0)
    return Workload(
        torch.where(one_B, first_kB[0], len(lens_S) + torch.arange(count)).tolist(),
        shared_B.tolist(),
        own_kB.sum(dim=0).tolist(),
        (shared + attention * shared * shared).tolist(),
        own_cost_B.tolist(),
    )


def same_prompts(sequences: Sequences) -> Tensor:
    """(S,) the first sequence whose prompt has the same tokens; itself where the prompt is below SHORTEST_PROMPT."""
    flat = sequences.tokens.flat.cpu().numpy()
    starts, prompts = sequences.tokens.offsets().tolist(), sequences.prompt_lens.tolist()
    seen: dict[bytes, int] = {}
    first = list(range(len(prompts)))
    for row, tokens in enumerate(prompts):
        if tokens >= SHORTEST_PROMPT:
            first[row] = seen.setdefault(flat[starts[row] : starts[row] + tokens].tobytes(), row)
    return torch.tensor(first, dtype=torch.int64)


# ---- even partitions ----


def balanced(costs_B: Tensor, count: int) -> list[Tensor]:
    """`count` index tensors, each increasing, together 0..B-1, with sums of the costs as near as two rules find them.

    The better of largest differencing (`differencing`) and the largest item to the lightest part (Graham 1969), by
    the heaviest part.  Parts may be empty where there are fewer items than parts.  Deterministic.
    """
    costs = costs_B.tolist()
    found = (differencing(costs, count), lightest_first(costs, count))
    best = min(found, key=lambda parts: heaviest(parts, costs))
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in best]


def heaviest(parts: Sequence[Sequence[int]], costs: Sequence[float]) -> float:
    return max((sum(costs[item] for item in part) for part in parts), default=0.0)


def differencing(costs: Sequence[float], count: int) -> list[list[int]]:
    """The largest differencing method (Karmarkar and Karp 1982) for `count` parts.

    Each item begins as a partition with one part that is not empty.  The two partitions of the largest spread, heaviest
    part less lightest, become one: the heaviest part of either joins the lightest of the other, and so on.
    """
    heap = [(-cost if count > 1 else 0.0, item, [(cost, item, [item])]) for item, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        joined = _joined(one, other, count)
        lightest = joined[-1][0] if len(joined) == count else 0.0
        heapq.heappush(heap, (lightest - joined[0][0], min(first, second), joined))
    parts = [items for _, _, items in heap[0][2]] if heap else []
    return parts + [[] for _ in range(count - len(parts))]


_Part = tuple[float, int, list[int]]
"""Cost, first item, items."""


def _joined(one: list[_Part], other: list[_Part], count: int) -> list[_Part]:
    """Heaviest part first, empty ones left out: place i of one meets place count - 1 - i of the other."""
    kept = count - len(other)
    found = one[:kept]
    for at, (cost, first, items) in enumerate(one[kept:], kept):
        more, second, others = other[count - 1 - at]
        found.append((cost + more, min(first, second), items + others))
    found += other[: count - len(one)]
    return sorted(found, key=lambda part: (-part[0], part[1]))


def lightest_first(costs: Sequence[float], count: int) -> list[list[int]]:
    """The largest item to the lightest part, and so on: the heaviest is within 4/3 of the best (Graham 1969)."""
    parts: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, 0, part) for part in range(count)]  # (cost, items, part)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, held, at = heap[0]
        parts[at].append(item)
        heapq.heapreplace(heap, (load + costs[item], held + 1, at))
    return parts
