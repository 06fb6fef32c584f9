"""A reward that costs nothing: the share of vowels.  For both sides; standard library alone."""

from __future__ import annotations

from typing import Any


def vowel_share(response: str) -> float:
    """For Tutelage: one response."""
    return sum(response.count(letter) for letter in "aeiou") / max(1, len(response))


def of_completions(completions: list[str], **rest: Any) -> list[float]:
    """For TRL: all of them."""
    return [vowel_share(text) for text in completions]
