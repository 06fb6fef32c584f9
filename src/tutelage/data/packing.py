"""Token budgets: which items run together in one padding-free forward.  B items."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError
from tutelage.sharing import Workload, differencing, heaviest, lightest_first


def pack_by_tokens(item_tokens_B: Tensor, budget: int, attention: float = 0.0) -> list[Tensor]:
    """`pack` of items that share nothing; an item of n tokens costs n + attention * n^2.

    Raises ConfigError for a budget below 1, ShapeError when the counts are not a vector of non-negative integers.
    """
    if item_tokens_B.ndim != 1 or item_tokens_B.is_floating_point() or bool((item_tokens_B < 0).any()):
        raise ShapeError(
            f"item tokens are {tuple(item_tokens_B.shape)} {item_tokens_B.dtype}", fix="pass one count per item"
        )
    return pack(Workload.of_tokens(item_tokens_B, attention), budget)


def pack(work: Workload, budget: int) -> list[Tensor]:
    """Bins of item indices (ascending within a bin) whose tokens sum to at most `budget`; an item is never split.

    An item above the budget has a bin to itself.  The number of bins is that of first-fit decreasing (at most
    11/9 of the optimum plus 6/9: Dosa 2007).  Over as many bins the costs are then evened out, by largest differencing
    (Karmarkar and Karp 1982) or the largest to the lightest, and the most even packing within the budget is taken.

    Items of one group are in one bin, their prompt counted once; a group above the budget is cut into as few even parts
    as the budget allows.  Where whole groups would need more bins than their items by themselves, these are packed.
    The costliest bin comes first.  Deterministic.  Raises ConfigError for a budget below 1.
    """
    if budget < 1:
        raise ConfigError(f"the token budget is {budget}", fix="give a budget of at least 1 token")
    items = [[item] for item in range(len(work))]
    units = [part for group in work.groups() for part in _within(group, work, budget)]
    if len(units) < len(items) and _count(units, work, budget) > _count(items, work, budget):
        units = items
    bins = [[item for unit in one for item in units[unit]] for one in _bins(*_sizes(units, work), budget)]
    costs = [work.cost(one) for one in bins]
    order = sorted(range(len(bins)), key=lambda at: (-costs[at], min(bins[at])))
    return [torch.tensor(sorted(bins[at]), dtype=torch.int64) for at in order]


def _within(group: list[int], work: Workload, budget: int) -> list[list[int]]:
    """The group, cut where it is above the budget."""
    if work.tokens(group) <= budget:
        return [group]
    room = budget - work.shared[group[0]]
    if room < 1:
        return [[item] for item in group]
    tokens, costs = [work.own[item] for item in group], [work.own_cost[item] for item in group]
    return [[group[at] for at in one] for one in _bins(tokens, costs, room)]


def _sizes(units: list[list[int]], work: Workload) -> tuple[list[int], list[float]]:
    return [work.tokens(unit) for unit in units], [work.cost(unit) for unit in units]


def _count(units: list[list[int]], work: Workload, budget: int) -> int:
    """Bins that first-fit decreasing needs."""
    tokens, _ = _sizes(units, work)
    order = _largest_first(tokens)
    alone = sum(size > budget for size in tokens)
    return alone + len(_first_fit(order[alone:], tokens, budget))


def _bins(tokens: list[int], costs: list[float], budget: int) -> list[list[int]]:
    """Within the budget, even in cost."""
    order = _largest_first(tokens)
    alone = [at for at in order if tokens[at] > budget]
    rest = order[len(alone) :]
    first_fit = _first_fit(rest, tokens, budget)
    rest_costs, count = [costs[at] for at in rest], len(first_fit)
    packings = [
        [[rest[at] for at in one] for one in rule(rest_costs, count)] for rule in (differencing, lightest_first)
    ]
    within = [bins for bins in packings if heaviest(bins, tokens) <= budget]
    bins = min([*within, first_fit], key=lambda bins: heaviest(bins, costs))
    return [[at] for at in alone] + bins


def _largest_first(tokens: Sequence[int]) -> list[int]:
    return sorted(range(len(tokens)), key=lambda at: (-tokens[at], at))


def _first_fit(order: list[int], tokens: Sequence[int], budget: int) -> list[list[int]]:
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
