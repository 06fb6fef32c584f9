"""When a response ends: EOS tokens, stop tokens, and stop strings found in its decoded text.

Shapes: B rows, X rows of the whole batch, V vocabulary, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Decoder(Protocol):
    """The part of a tokenizer that generation needs."""

    def __len__(self) -> int: ...
    def batch_decode(self, sequences: Any, skip_special_tokens: bool = ..., **kwargs: Any) -> list[str]: ...


class Stopping:
    """Says, after each decode step, which rows have just ended.

    Stop strings are looked for in the decoded tail of a response, special tokens included, so a string may span tokens
    and characters may span bytes. A row is decoded only when its newest token can complete a stop string: when the
    token's own text holds the last character of one, or is a part of a character. Where that character is a space
    every token can, because tokenizers put spaces between tokens.
    """

    def __init__(
        self, decoder: Decoder, token_ids: Sequence[int], strings: Sequence[str], device: torch.device
    ) -> None:
        self.token_ids = torch.tensor(sorted(set(token_ids)), dtype=torch.int64, device=device)
        self._decoder = decoder
        self._strings = tuple(strings)
        # A character is at most four byte tokens; the slack keeps a cut character at the tail's start out of the way.
        self.tail = 4 * max(map(len, self._strings), default=0) + 4
        self._can_complete_V = self._completing_tokens().to(device) if self._strings else None

    @property
    def has_strings(self) -> bool:
        return bool(self._strings)

    def by_token(self, token_B: Tensor) -> Tensor:
        """(B,) bool: rows that end with a token that ends any response."""
        return torch.isin(token_B, self.token_ids)

    def may_complete(self, token_B: Tensor) -> Tensor:
        """(B,) bool: rows whose newest token can complete a stop string, so that their text must be looked at."""
        if self._can_complete_V is None:
            return torch.zeros_like(token_B, dtype=torch.bool)
        known_B = token_B < self._can_complete_V.shape[0]
        return known_B & self._can_complete_V[token_B * known_B]

    def holds_string(self, tails: Sequence[Sequence[int]]) -> list[bool]:
        """Whether the text of the last tokens of a response, up to `tail` of them, holds a stop string."""
        texts = decode_rows(self._decoder, tails, skip_special_tokens=False)
        return [any(s in text for s in self._strings) for text in texts]

    def ended(self, token_B: Tensor, tokens_XT: Tensor, row_B: Tensor, alive_B: Tensor, length: int) -> Tensor:
        """(B,) bool: rows that end with `token`, the last of the `length` response tokens in tokens_XT[row]."""
        ended_B = self.by_token(token_B)
        rows = (self.may_complete(token_B) & alive_B & ~ended_B).nonzero().squeeze(1)
        if rows.shape[0]:
            tails = tokens_XT[row_B[rows], max(0, length - self.tail) : length].tolist()
            ended_B[rows] = torch.tensor(self.holds_string(tails), device=rows.device)
        return ended_B

    def _completing_tokens(self) -> Tensor:
        """(V,) bool over the tokenizer's vocabulary."""
        last = {s[-1] for s in self._strings}
        size = len(self._decoder)
        if " " in last:
            return torch.ones(size, dtype=torch.bool)
        pieces = decode_rows(self._decoder, [[i] for i in range(size)], skip_special_tokens=False)
        return torch.tensor([not last.isdisjoint(piece) or "\ufffd" in piece for piece in pieces], dtype=torch.bool)


def decode_rows(decoder: Decoder, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
    """Text of each row exactly as the tokens spell it (no clean-up of spaces)."""
    if not rows:
        return []
    return decoder.batch_decode(
        [list(row) for row in rows], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
