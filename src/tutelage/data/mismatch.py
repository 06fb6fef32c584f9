"""To every row another row's answer, given to another prompt: what KTO estimates the KL from.   Shapes: B rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutelage.errors import DataError
from tutelage.math.keyed import keyed_permutation, sample_key


def mismatched_rows(prompts: Sequence[str], seed: int) -> Tensor:
    """(B,) int64: the row whose answer stands in for row b's own; never a row with the same prompt, so never b itself.

    Rows lie in an order keyed by the seed, those of one prompt side by side, and each takes the answer that is as many
    places further as the most frequent prompt has rows.  So every answer is used exactly once where no prompt has more
    than half of the rows.  Where one has, its rows use the other answers in turn, and the others use its answers.
    Nothing depends on batches: a row keeps its mismatched answer for the whole run.

    Raises DataError where all rows have one prompt.
    """
    if len(set(prompts)) < 2:
        raise DataError(
            f"all {len(prompts)} rows have one prompt: KTO's KL needs answers that were given to other prompts",
            fix="give rows with other prompts (raise data.eval_fraction, or hold out none), or another kto.loss",
        )
    shuffled = keyed_permutation(len(prompts), sample_key(seed, 0, "mismatched answers", 0, "data")).tolist()
    groups: dict[str, list[int]] = {}
    for row in shuffled:
        groups.setdefault(prompts[row], []).append(row)
    order = [row for rows in groups.values() for row in rows]
    most = max(groups.values(), key=len)
    partner = [0] * len(prompts)
    if 2 * len(most) <= len(prompts):
        for place, row in enumerate(order):
            partner[row] = order[(place + len(most)) % len(order)]
    else:
        frequent = set(most)
        others = [row for row in order if row not in frequent]
        for place, row in enumerate(most):
            partner[row] = others[place % len(others)]
        for place, row in enumerate(others):
            partner[row] = most[place]
    return torch.tensor(partner, dtype=torch.int64)
