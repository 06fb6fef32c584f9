"""Rules that need no code: each function takes the settings and returns the rule.

A recipe names one as `exact_match`, or with settings as `length_range(low=20, high=80)`. A rule is called with
(prompts, responses, truths) and returns one float per response.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tutelage.errors import RewardError
from tutelage.protocols import RewardRule


def _per_response(score: Callable[[str], float]) -> RewardRule:
    """A rule that looks at the response alone."""

    def rule(prompts: Sequence[str], responses: Sequence[str], truths: Sequence[Any]) -> list[float]:
        return [score(response) for response in responses]

    return rule


def _compiled(pattern: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise RewardError(
            f"{name} {pattern!r} is not a regular expression: {error}", fix="correct the pattern"
        ) from error


def exact_match(ignore_case: bool = False, extract: str | None = None) -> RewardRule:
    r"""1 when the response equals the ground truth, else 0; white space at both ends does not count.

    extract: a regular expression; its last match in the response (group 1 where it has one) is compared instead of the
    whole, and no match scores 0: `exact_match(extract='####\\s*(-?\\d+)')`.
    A row without a ground truth raises RewardError.
    """
    pattern = None if extract is None else _compiled(extract, "exact_match: extract")

    def answer(response: str) -> str | None:
        if pattern is None:
            return response
        found = list(pattern.finditer(response))
        return found[-1].group(1 if pattern.groups else 0) if found else None

    def normal(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    def rule(prompts: Sequence[str], responses: Sequence[str], truths: Sequence[Any]) -> list[float]:
        scores = []
        for row, (response, truth) in enumerate(zip(responses, truths, strict=True)):
            if truth is None:
                fix = "give the data a truth column, or drop this rule"
                raise RewardError(f"exact_match has no ground truth for row {row}", fix=fix)
            got = answer(response)
            scores.append(float(got is not None and normal(got) == normal(str(truth))))
        return scores

    return rule


def regex(pattern: str) -> RewardRule:
    """1 when the regular expression is found anywhere in the response, else 0."""
    compiled = _compiled(pattern, "regex: pattern")
    return _per_response(lambda response: float(compiled.search(response) is not None))


def length_range(low: int = 0, high: int | None = None, unit: Literal["words", "characters"] = "words") -> RewardRule:
    """1 when the response has `low` to `high` words (split at white space) or characters, both included, else 0."""
    if unit not in ("words", "characters"):
        raise RewardError(f"length_range: unit is {unit!r}", fix="use words or characters")
    if low < 0 or (high is not None and high < low):
        raise RewardError(f"length_range: low is {low} and high is {high}", fix="use 0 <= low <= high")

    def score(response: str) -> float:
        length = len(response.split()) if unit == "words" else len(response)
        return float(low <= length and (high is None or length <= high))

    return _per_response(score)


def repetition_share(ngram: int = 3) -> RewardRule:
    """1 - (different word n-grams / all word n-grams) of the response, from 0 (nothing repeated) towards 1.

    0 for a response shorter than n words. Words are lower-cased and split at white space. Give it a negative weight.
    """
    if ngram < 1:
        raise RewardError(f"repetition_share: ngram is {ngram}", fix="use at least 1")

    def score(response: str) -> float:
        words = response.lower().split()
        grams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0

    return _per_response(score)


def ends_with_punctuation(marks: str = ".!?") -> RewardRule:
    """1 when the last character of the response, closing quotes, brackets and white space aside, is one of `marks`."""

    def score(response: str) -> float:
        end = response.rstrip().rstrip("\"'”’)]}»").rstrip()
        return float(bool(end) and end[-1] in marks)

    return _per_response(score)


BUILTIN_RULES: dict[str, Callable[..., RewardRule]] = {
    "exact_match": exact_match,
    "regex": regex,
    "length_range": length_range,
    "repetition_share": repetition_share,
    "ends_with_punctuation": ends_with_punctuation,
}
