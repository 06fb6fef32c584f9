"""Which of several responses to each prompt are kept as demonstrations.   Shapes: B responses."""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.errors import ConfigError, closest
from tutelage.math.masking import require_same_shape

KINDS = ("best", "top_k", "threshold")


def kept_responses(
    score_B: Tensor, group_B: Tensor, valid_B: Tensor, kind: str, *, top_k: int = 1, threshold: float = 0.0
) -> Tensor:
    """(B,) bool: the responses that are kept   (RAFT, Dong et al. 2023, arXiv:2304.06767, algorithm 1).

        best       the highest score of each prompt
        top_k      the `top_k` highest scores of each prompt, all of them where there are fewer
        threshold  every score of at least `threshold`

    group_B: which prompt a response answers.  Equal scores are kept in the order of the batch.  Responses that are not
    valid are never kept, and their scores never read.
    Raises ShapeError when shapes differ, ConfigError for an unknown kind or top_k below 1.
    """
    require_same_shape(score=score_B, group=group_B, valid=valid_B)
    if kind not in KINDS:
        raise ConfigError(
            f"{kind!r} is not a way to keep.{closest(kind, KINDS)}", fix=f"choose one of {', '.join(KINDS)}"
        )
    if top_k < 1:
        raise ConfigError(f"top_k is {top_k}", fix="keep at least 1 response of each prompt")
    valid_B = valid_B.bool()
    if kind == "threshold":
        return valid_B & (score_B >= threshold)
    return valid_B & (rank_in_group(score_B, group_B, valid_B) < (1 if kind == "best" else top_k))


def rank_in_group(score_B: Tensor, group_B: Tensor, valid_B: Tensor) -> Tensor:
    """(B,) how many responses of the same group come before: of a higher score, or equal and earlier; invalid last."""
    by_score = torch.argsort(score_B.masked_fill(~valid_B, -torch.inf), descending=True, stable=True)
    order_B = by_score[torch.argsort(group_B[by_score], stable=True)]
    place_B = torch.arange(len(score_B), device=score_B.device)
    sorted_B = group_B[order_B]
    starts_B = torch.cat([sorted_B.new_ones(1, dtype=torch.bool)[: len(sorted_B)], sorted_B[1:] != sorted_B[:-1]])
    first_B = torch.where(starts_B, place_B, 0).cummax(dim=0).values if len(place_B) else place_B
    return torch.empty_like(place_B).index_copy(0, order_B, place_B - first_B)


def duplicates(rows: list[list[int]], group: list[int], kept: list[bool]) -> list[bool]:
    """Which kept responses repeat, token for token, a kept one to the same prompt that stands before them."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = []
    for row, prompt, keep in zip(rows, group, kept, strict=True):
        key = (prompt, tuple(row))
        found.append(keep and key in seen)
        if keep:
            seen.add(key)
    return found
