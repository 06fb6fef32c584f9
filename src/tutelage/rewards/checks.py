"""What every reward source shares: the text of a prompt, and a check that names the row that is wrong.

Shapes: B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tutelage.errors import RewardError
from tutelage.types import Rollout


def prompt_text(messages: Sequence[Mapping[str, str]]) -> str:
    """What a rule sees as the prompt: the content of a single message, else one `role: content` line per message."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def row_name(rollout: Rollout, row: int) -> str:
    """`row 3 (prompt 'abc', sample 0, response 'The first words...')`."""
    text = rollout.texts[row]
    shown = text if len(text) <= 60 else text[:57] + "..."
    return f"row {row} (prompt {rollout.prompt_ids[row]!r}, sample {int(rollout.samples[row])}, response {shown!r})"


def require_scores(values: Tensor, rollout: Rollout, source: str, fix: str) -> Tensor:
    """`values` as (B,) float32 on the CPU. Raises RewardError for another shape, and for NaN or infinity by its row."""
    if tuple(values.shape) != (len(rollout),):
        raise RewardError(
            f"{source} returned scores of shape {tuple(values.shape)} for {len(rollout)} responses", fix=fix
        )
    values_B = values.detach().to("cpu", torch.float32)
    bad = (~values_B.isfinite()).nonzero().squeeze(1)
    if bad.shape[0]:
        row = int(bad[0])
        more = f", and {bad.shape[0] - 1} more row{'s' * (bad.shape[0] > 2)}" if bad.shape[0] > 1 else ""
        raise RewardError(f"{source} returned {values_B[row].item()} for {row_name(rollout, row)}{more}", fix=fix)
    return values_B
