"""A key/value cache with one slot per row, written at explicit positions and never padded on the left.

Shapes: B slots, H key/value heads, L positions of a slot, D head size, N packed prompt tokens, b rows still decoding.

A packed prefill (1, N) scatters each prompt's keys and values into the slots of all its samples. A decode step (b, 1)
writes one position per row and attends over the first `width` positions, of which `slot_mask` shows the row's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlottedCache(Cache):
    """B slots of L positions per layer, allocated when a layer is first written, in the dtype the model computes in.

    Unwritten positions are 0, so that a masked position never carries a NaN into the weighted sum.
    """

    def __init__(self, slots: int, positions: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.positions = positions
        self.rows = slots
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._source_M = self._slot_M = self._position_M = torch.empty(0, dtype=torch.int64)
        self._row_b = torch.empty(0, dtype=torch.int64)
        self._width = 0
        self._written = 0
        self._prefill = True

    def begin_prefill(self, source_M: Tensor, slot_M: Tensor, position_M: Tensor) -> None:
        """The next forward pass is packed: token source[m] goes to slot[m] at position[m]; a token may go twice."""
        self._source_M, self._slot_M, self._position_M = source_M, slot_M, position_M
        self._written = max(self._written, int(position_M.max()) + 1)
        self._prefill = True

    def begin_decode(self, position_b: Tensor, width: int) -> Tensor:
        """The next forward pass decodes one token per row, at `position`; width is the largest position + 1.

        Returns the slot mask (b, 1, 1, width): True at positions up to and including the row's own.
        """
        self._prefill = False
        self._row_b = torch.arange(self.rows, device=position_b.device)
        self._position_M = position_b
        self._width = self._written = width
        return (torch.arange(width, device=position_b.device)[None, :] <= position_b[:, None])[:, None, None, :]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer; return what its queries attend to: the packed states, or (b, H, width, D) of the slots."""
        while len(self._keys) <= layer_idx:
            self._keys.append(self._empty(key_states))
            self._values.append(self._empty(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._prefill:
            keys[self._slot_M, :, self._position_M] = key_states[0].transpose(0, 1)[self._source_M]
            values[self._slot_M, :, self._position_M] = value_states[0].transpose(0, 1)[self._source_M]
            return key_states, value_states
        keys[self._row_b, :, self._position_M] = key_states[:, :, 0]
        values[self._row_b, :, self._position_M] = value_states[:, :, 0]
        return keys[: self.rows, :, : self._width], values[: self.rows, :, : self._width]

    def compact(self, keep_b: Tensor) -> None:
        """Move the rows `keep_b` (ascending) to the front, in place; the others are no longer decoded."""
        kept = keep_b.shape[0]
        for store in (*self._keys, *self._values):
            store[:kept, :, : self._written] = store[:, :, : self._written].index_select(0, keep_b)
        self.rows = kept

    def _empty(self, states: Tensor) -> Tensor:
        return states.new_zeros((self.slots, states.shape[1], self.positions, states.shape[3]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return (query_length if self._prefill else self._width), 0

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        return self.positions
