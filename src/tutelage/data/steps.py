"""Where the steps of an answer end, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def step_ends(tokenizer: Any, response: Sequence[int], separator: str) -> list[int]:
    """Positions of the last token of every step of a response, increasing; at least one where there is a token.

    A step is text that is not blank, up to the separator behind it.  Its last token is the one that completes the
    separator.  The last step has none: it ends with the last token of the response, an EOS included.  The tokens are
    read as they are, so what was sampled is what is scored; special tokens are no text.
    """
    ends: list[int] = []
    start = 0
    may_end: dict[int, bool] = {}
    for position, token in enumerate(response):
        if token not in may_end:
            alone = str(tokenizer.decode([token], skip_special_tokens=True))
            may_end[token] = separator[-1] in alone or PART_OF_A_CHARACTER in alone
        if not may_end[token]:
            continue
        text = str(tokenizer.decode(list(response[start : position + 1]), skip_special_tokens=True)).lstrip()
        if separator in text and text.replace(separator, "").strip():
            ends.append(position)
            start = position + 1
    rest = str(tokenizer.decode(list(response[start:]), skip_special_tokens=True)) if start < len(response) else ""
    if rest.strip() or (response and not ends):
        ends.append(len(response) - 1)
    return ends
