"""Pooled hidden states of sequences below a frozen trunk, computed once.

Shapes: B sequences, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutelage.types import Ragged


class FeatureCache:
    """Remembers one vector a sequence, by its tokens and the length of its prompt.

    Right only while the trunk does not change: a reward model of which the head alone is trained.  Memory: 4 H bytes a
    different sequence.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[bytes, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, tokens: Ragged, prompt_lens_B: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, H): known rows from memory, the others by `compute(index_b)` -> (b, H), without gradient."""
        rows = zip(tokens.rows(), prompt_lens_B.tolist(), strict=True)
        keys = [(row.cpu().numpy().tobytes(), prompt) for row, prompt in rows]
        missing = [i for i, key in enumerate(keys) if key not in self._rows]
        if missing:
            with torch.no_grad():
                found_bH = compute(torch.tensor(missing)).float()
            self._rows.update((keys[i], vector) for i, vector in zip(missing, found_bH, strict=True))
        return torch.stack([self._rows[key] for key in keys])
