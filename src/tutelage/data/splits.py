"""Splits by prompt: rows of one group stay together, and the order of the rows does not matter."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from tutelage.errors import DataError


def group_hash(seed: int, group: str) -> int:
    """A number in [0, 2^64) that depends on the seed and the group alone (SHA-256)."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{group}".encode()).digest()[:8], "big")


def split_by_group(groups: Sequence[str], fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices kept and indices held out, both ascending: a group is held out when its hash is below fraction * 2^64.

    So a group falls on the same side wherever it stands and whatever stands beside it.  The held-out share of rows is
    about `fraction`.  With a fraction above 0 neither side is empty: the group of the lowest hash is held out if none
    would be, the one of the highest kept if none would be.
    Raises DataError when the fraction is above 0 and there are fewer than two groups.
    """
    hashes = {group: group_hash(seed, group) for group in groups}
    held = {group for group, value in hashes.items() if value < fraction * 2**64}
    if fraction > 0:
        if len(hashes) < 2:
            raise DataError(
                f"{len(groups)} rows have {len(hashes)} different prompts, so none can be held out",
                fix="give more data, a data.eval file, or data.eval_fraction=0",
            )
        ordered = sorted(hashes, key=lambda group: (hashes[group], group))
        held = (held or {ordered[0]}) - ({ordered[-1]} if len(held) == len(hashes) else set())
    mask = torch.tensor([group in held for group in groups], dtype=torch.bool)
    return torch.nonzero(~mask).flatten(), torch.nonzero(mask).flatten()


def grouped_folds(groups: Sequence[str], k: int, seed: int) -> list[Tensor]:
    """k disjoint ascending index arrays that cover every row once; a group is in one fold.

    Groups go, the largest first, into the smallest fold so far; ties by the seeded hash, so that the order of the rows
    does not matter.  Raises DataError when k < 2 or there are fewer groups than folds.
    """
    sizes = Counter(groups)
    if k < 2 or len(sizes) < k:
        raise DataError(f"{len(sizes)} groups cannot fill {k} folds", fix="use 2 or more folds and at least k prompts")
    fold_of: dict[str, int] = {}
    loads = [0] * k
    for group in sorted(sizes, key=lambda name: (-sizes[name], group_hash(seed, name), name)):
        fold_of[group] = min(range(k), key=lambda fold: (loads[fold], fold))
        loads[fold_of[group]] += sizes[group]
    fold_B = torch.tensor([fold_of[group] for group in groups])
    return [torch.nonzero(fold_B == fold).flatten() for fold in range(k)]
