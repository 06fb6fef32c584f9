"""Ragged columns and token sequences: a flat tensor plus lengths is the only storage.

Shapes: B sequences, S prompt+response tokens, T response tokens, N flat tokens, R flat response tokens.

`(B, T)` padding is made for `math/` only.  Nothing is ever left-padded, and no meaning is read from a token being equal
to `pad` or `eos`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Ragged:
    """B rows of different length, flat: `flat` (N, ...) and `lens` (B,) int64 with `lens.sum() == N`."""

    flat: Tensor
    lens: Tensor

    def __post_init__(self) -> None:
        if self.lens.ndim != 1 or int(self.lens.sum()) != self.flat.shape[0]:
            raise ShapeError(f"lengths sum to {int(self.lens.sum())}, the flat tensor has {self.flat.shape[0]} rows")

    def __len__(self) -> int:
        return self.lens.shape[0]

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor], dtype: torch.dtype | None = None) -> Ragged:
        """One tensor per row -> flat. An empty sequence of rows gives an empty column."""
        lens = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
        flat = torch.cat(list(rows)) if rows else torch.empty(0)
        return cls(flat if dtype is None else flat.to(dtype), lens)

    @classmethod
    def from_padded(cls, x_BT: Tensor, lens: Tensor) -> Ragged:
        """The first `lens[b]` entries of each row of `(B, T, ...)`."""
        return cls(x_BT[valid_mask(lens, x_BT.shape[1])], lens)

    def padded(self, fill: float = 0) -> Tensor:
        """`(B, T, ...)` with T the longest row; right-padded with `fill`."""
        width = int(self.lens.max()) if len(self) else 0
        out = self.flat.new_full((len(self), width, *self.flat.shape[1:]), fill)
        out[valid_mask(self.lens, width)] = self.flat
        return out

    def with_flat(self, flat: Tensor) -> Ragged:
        """The same row lengths over another flat tensor."""
        return Ragged(flat, self.lens)

    def offsets(self) -> Tensor:
        """(B + 1,) start of each row in `flat`, and the end of the last."""
        return torch.cat([self.lens.new_zeros(1), self.lens.cumsum(0)])

    def rows(self) -> list[Tensor]:
        """A list of B views."""
        return list(torch.split(self.flat, self.lens.tolist()))

    def select(self, index_B: Tensor) -> Ragged:
        """Rows `index_B`, in that order."""
        return Ragged(self.flat[flat_index(self.lens, index_B)], self.lens[index_B])

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(self.flat.to(device), self.lens.to(device))

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        return cls(torch.cat([p.flat for p in parts]), torch.cat([p.lens for p in parts]))


def valid_mask(lens: Tensor, width: int) -> Tensor:
    """(B, width) bool: position < length."""
    return torch.arange(width, device=lens.device)[None, :] < lens[:, None]


def flat_index(lens: Tensor, index_B: Tensor) -> Tensor:
    """Flat positions of rows `index_B`, in that order, without a Python loop over rows."""
    picked = lens[index_B]
    starts = torch.cat([lens.new_zeros(1), lens.cumsum(0)])[index_B]
    row_start = torch.repeat_interleave(starts, picked)
    within = torch.arange(int(picked.sum()), device=lens.device)
    within = within - torch.repeat_interleave(picked.cumsum(0) - picked, picked)
    return row_start + within


@dataclass(frozen=True, eq=False)
class Sequences:
    """B token sequences, each a prompt followed by a response.

    tokens   Ragged over S (prompt + response).
    prompt_lens (B,)  tokens of the prompt; the response is the rest.  The boundary is a token boundary, always.
    trained  Ragged bool over T (response): tokens the policy produced and is trained on.  False marks tool or
             environment tokens inside the response (a hole).
    """

    tokens: Ragged
    prompt_lens: Tensor
    trained: Ragged

    def __post_init__(self) -> None:
        if not torch.equal(self.trained.lens, self.tokens.lens - self.prompt_lens):
            raise ShapeError("prompt_lens + response lengths differ from the token lengths")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def build(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        trained: Sequence[Sequence[bool]] | None = None,
    ) -> Sequences:
        """From token-id lists; every response token is trained unless `trained` says otherwise."""
        rows = [torch.tensor([*p, *r], dtype=torch.int64) for p, r in zip(prompts, responses, strict=True)]
        masks = trained if trained is not None else [[True] * len(r) for r in responses]
        return cls(
            Ragged.from_rows(rows, torch.int64),
            torch.tensor([len(p) for p in prompts], dtype=torch.int64),
            Ragged.from_rows([torch.tensor(m, dtype=torch.bool) for m in masks], torch.bool),
        )

    @property
    def response_lens(self) -> Tensor:
        return self.trained.lens

    def response_index(self) -> Tensor:
        """(R,) flat positions of the response tokens in `tokens.flat`."""
        keep = torch.repeat_interleave(self.prompt_lens, self.tokens.lens)
        within = torch.arange(self.tokens.flat.shape[0], device=keep.device)
        within = within - torch.repeat_interleave(self.tokens.offsets()[:-1], self.tokens.lens)
        return torch.nonzero(within >= keep).squeeze(1)

    def responses(self) -> Ragged:
        return Ragged(self.tokens.flat[self.response_index()], self.response_lens)

    def prompt_rows(self) -> list[list[int]]:
        return [r[:n].tolist() for r, n in zip(self.tokens.rows(), self.prompt_lens.tolist(), strict=True)]

    def response_rows(self) -> list[list[int]]:
        return [r.tolist() for r in self.responses().rows()]

    def select(self, index_B: Tensor) -> Sequences:
        return Sequences(self.tokens.select(index_B), self.prompt_lens[index_B], self.trained.select(index_B))

    def to(self, device: torch.device | str) -> Sequences:
        return Sequences(self.tokens.to(device), self.prompt_lens.to(device), self.trained.to(device))

    @classmethod
    def concat(cls, parts: Sequence[Sequences]) -> Sequences:
        return cls(
            Ragged.concat([p.tokens for p in parts]),
            torch.cat([p.prompt_lens for p in parts]),
            Ragged.concat([p.trained for p in parts]),
        )
