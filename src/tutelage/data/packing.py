"""Token budgets: which items run together in one padding-free forward.  B items."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError


def pack_by_tokens(item_tokens_B: Tensor, budget: int) -> list[Tensor]:
    """Bins of item indices (ascending within a bin) whose tokens sum to at most `budget`; an item is never split.

    An item above the budget has a bin to itself.  The number of bins is that of first-fit decreasing (at most
    11/9 of the optimum plus 6/9: Dosa 2007); the items are then dealt, the largest first, each to the lightest bin, and
    that more even packing is taken when it keeps the budget.  The heaviest bin comes first.  Deterministic.
    Raises ConfigError for a budget below 1, ShapeError when the counts are not a vector of non-negative integers.
    """
    if budget < 1:
        raise ConfigError(f"the token budget is {budget}", fix="give a budget of at least 1 token")
    if item_tokens_B.ndim != 1 or item_tokens_B.is_floating_point() or bool((item_tokens_B < 0).any()):
        raise ShapeError(
            f"item tokens are {tuple(item_tokens_B.shape)} {item_tokens_B.dtype}", fix="pass one count per item"
        )
    tokens = item_tokens_B.tolist()
    order = sorted(range(len(tokens)), key=lambda item: (-tokens[item], item))
    alone = [item for item in order if tokens[item] > budget]
    rest = order[len(alone) :]
    bins = _first_fit(rest, tokens, budget)
    even = _lightest_first(rest, tokens, len(bins))
    if all(sum(tokens[item] for item in one) <= budget for one in even):
        bins = even
    bins = [[item] for item in alone] + bins
    bins.sort(key=lambda one: (-sum(tokens[item] for item in one), min(one)))
    return [torch.tensor(sorted(one), dtype=torch.int64) for one in bins]


def _first_fit(order: list[int], tokens: list[int], budget: int) -> list[list[int]]:
    """Each item into the first bin with room for it."""
    bins: list[list[int]] = []
    room = torch.empty(len(order), dtype=torch.int64)
    for item in order:
        fits = torch.nonzero(room[: len(bins)] >= tokens[item])
        if len(fits):
            at = int(fits[0])
        else:
            at = len(bins)
            bins.append([])
            room[at] = budget
        bins[at].append(item)
        room[at] -= tokens[item]
    return bins


def _lightest_first(order: list[int], tokens: list[int], count: int) -> list[list[int]]:
    """Each item into the lightest of `count` bins."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, index) for index in range(count)]
    for item in order:
        load, held, at = heap[0]
        bins[at].append(item)
        heapq.heapreplace(heap, (load + tokens[item], held + 1, at))
    return bins
