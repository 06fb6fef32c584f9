"""Two sides that answered the same prompts, as one batch of pairs.   Shapes: B responses of a side."""

from __future__ import annotations

import torch

from tutelage.errors import ShapeError
from tutelage.types import Rollout


def duels(own: Rollout, rival: Rollout) -> Rollout:
    """(2B) rows: response b of the policy, then response b of the other side; `group` is the number of the pair.

    The other side's rows carry the weights version of the policy they stand beside: it is the policy that ages.
    Raises ShapeError where the rows answer different prompts.
    """
    if own.prompt_ids != rival.prompt_ids:
        raise ShapeError(
            f"{len(own)} responses of the policy and {len(rival)} of the other side answer different prompts",
            fix="ask both for the same prompts and the same number of samples",
        )
    count = len(own)
    both = Rollout.concat([own, rival.adding(weights_version=own.weights_version)])
    rows = torch.arange(2 * count).reshape(2, count).T.flatten()
    return both.select(rows).adding(group=torch.arange(count).repeat_interleave(2))
