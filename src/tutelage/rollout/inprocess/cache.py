"""Keys and values in pages of equal size: storage, one pool per layer.

Shapes: X pages, g key/value heads, z positions of a page, D head size, N packed prompt tokens, b rows still decoding.

A packed prefill (1, N) writes each prompt's keys and values once, into the pages of the prompt.  A decode step (b, 1)
writes one position per row, into the row's own page, and gives the attention the whole pool with a
`models.decoding.PagedStep` that says who reads what.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tutelage.models.decoding import PagedStep, product_dtype
from tutelage.native import ops


class PagedCache(Cache):
    """X pages of z positions per layer, allocated once, when a layer is first written.

    Pages have the dtype of the model where the compiled kernels read them.  Else that in which the attention multiplies
    (`models.decoding.product_dtype`): float32 for half precision on a CPU, so that no step converts every page that it
    reads.  That is twice the bytes.

    A page that is given out is set to 0 where it is not written at once.  A hidden position has weight 0, and that
    times what an earlier row or the allocator left there must be 0 too.  (The kernels look at no hidden position.)
    """

    def __init__(self, pages: int, page: int) -> None:
        super().__init__(layers=[])
        self.pages = pages
        self.page = page
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._page_n = self._at_n = self._clear = torch.empty(0, dtype=torch.int64)
        self._step: PagedStep | None = None
        self._longest = 0

    @property
    def bytes(self) -> int:
        return sum(store.nbytes for store in (*self._keys, *self._values))

    def stores(self) -> list[Tensor]:
        """Every layer's keys and values, (X, g, z, D) each."""
        return [*self._keys, *self._values]

    def begin_prefill(self, page_N: Tensor, at_N: Tensor, partial: Tensor) -> None:
        """The next forward pass is packed: token n goes to position at[n] of page[n].

        partial: pages that are not filled to the end.
        """
        self._page_n, self._at_n, self._clear = page_N, at_N, partial
        self._step = None

    def begin_decode(self, step: PagedStep, fresh: Tensor) -> None:
        """The next forward pass decodes one token per row; fresh: pages that rows begin with it."""
        self._page_n, self._at_n, self._clear = step.write_page, step.write_at, fresh
        self._step, self._longest = step, step.longest

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer; return what its queries attend to: the packed states, or the pools (X, g, z, D)."""
        while len(self._keys) <= layer_idx:
            self._keys.append(self._empty(key_states))
            self._values.append(self._empty(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._clear.shape[0]:
            keys.index_fill_(0, self._clear, 0.0)
            values.index_fill_(0, self._clear, 0.0)
        if self._step is not None and ops.takes(key_states, value_states, keys, values):
            ops.page_write(key_states, keys, self._page_n, self._at_n)
            ops.page_write(value_states, values, self._page_n, self._at_n)
            return keys, values
        if self._step is None:
            keys[self._page_n, :, self._at_n] = key_states[0].transpose(0, 1).to(keys.dtype)
            values[self._page_n, :, self._at_n] = value_states[0].transpose(0, 1).to(values.dtype)
            return key_states, value_states
        keys[self._page_n, :, self._at_n] = key_states[:, :, 0].to(keys.dtype)
        values[self._page_n, :, self._at_n] = value_states[:, :, 0].to(values.dtype)
        return keys, values

    def _empty(self, states: Tensor) -> Tensor:
        shape = (self.pages, states.shape[1], self.page, states.shape[3])
        return states.new_empty(shape, dtype=states.dtype if ops.takes(states) else product_dtype(states))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._step is None else self._longest - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return (query_length if self._step is None else self._longest), 0

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        return self.pages * self.page
