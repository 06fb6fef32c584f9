r"""Rules that compare a final answer with the truth: exact numbers here, everything else by math-verify.  Torch-free.

math-verify bounds its own time with signals, which work in a main thread only and end nothing that holds the
interpreter; its limits are off here, and the deadline of the rule's process holds.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from tutelage.errors import RewardError
from tutelage.rewards.answers import Form, Number, last_number, marked_answer, number_of, plain
from tutelage.rewards.builtin import require_extra, require_truth

LONGEST = 300
"""Characters of an expression that is given to math-verify; a longer one is no answer."""
_HEAVY = re.compile(
    r"\^\s*(?:\{[^{}]*\d\s*\^|-?\d+\s*\^)|\^\s*\{?\s*-?\d{4,}|\*\*\s*\(?-?\d+\s*\*\*|\*\*\s*\(?-?\d{4,}|\d{4,}\s*!|!\s*!|\d{60,}"
)
"""Towers of powers, large exponents and factorials, numbers of 60 digits: sympy would compute them."""


def math_answer(extract: Literal["strict", "lenient"] = "strict", form: Form = "either") -> Callable[..., float]:
    r"""1 when the final answer equals the truth, exactly or symbolically, else 0.

    strict   the last answer in the form that was asked for; a response without it scores 0.
             form: hash (`#### N`), boxed (`\boxed{N}`), or either.
    lenient  the same where there is one, else the last answer in the other form, else the last number or expression.
             What is right strictly is right leniently.
    truth    a number, an expression, or a whole solution with a marked answer in it, as in GSM8K.  One that cannot be
             read raises RewardError.

    Numbers are compared as exact fractions; currency, units, thousands commas and percent signs do not count (50% is
    50 and 1/2).  Everything else is compared by math-verify, to six decimals.  Needs the package math-verify.
    """
    require_extra("math_verify", "math_answer")
    if extract not in ("strict", "lenient"):
        raise RewardError(f"math_answer: extract is {extract!r}", fix="use strict or lenient")
    if form not in ("hash", "boxed", "either"):
        raise RewardError(f"math_answer: form is {form!r}", fix="use hash, boxed or either")
    _library()  # so that no response pays for the import with its deadline

    def rule(response: str, truth: Any) -> float:
        expected = truth_text(require_truth(truth, "math_answer"))
        answer = marked_answer(response, form)
        if answer is None and extract == "lenient":
            answer = marked_answer(response, "either")
        if answer is not None:
            return float(equal(expected, answer))
        return float(extract == "lenient" and equal_to_last(expected, response))

    return rule


def numeric_match(
    tolerance: float = 1e-6, relative: bool = True, extract: Literal["strict", "lenient"] = "lenient"
) -> Callable[..., float]:
    """1 when the final number is within a tolerance of the truth, else 0:  |answer - truth| <= tolerance * scale.

    relative: scale is max(1, |truth|), else 1.  strict reads a marked answer only; lenient reads the last number where
    none is marked.  A truth that is no number raises RewardError.
    """
    if not (tolerance >= 0 and math.isfinite(tolerance)):
        raise RewardError(f"numeric_match: tolerance is {tolerance}", fix="use a finite number from 0")
    if extract not in ("strict", "lenient"):
        raise RewardError(f"numeric_match: extract is {extract!r}", fix="use strict or lenient")
    allowed = Fraction(tolerance)

    def rule(response: str, truth: Any) -> float:
        text = truth_text(require_truth(truth, "numeric_match"))
        expected = number_of(text)
        if expected is None:
            raise RewardError(f"numeric_match: the truth {text!r} is no number", fix="use math_answer or exact_match")
        marked = marked_answer(response)
        answer = None if marked is None else number_of(marked)
        if marked is None and extract == "lenient":
            answer = last_number(response)
        return float(answer is not None and near(answer, expected, allowed, relative))

    return rule


def near(answer: Number, truth: Number, allowed: Fraction, relative: bool) -> bool:
    """Whether any reading of the answer is within the tolerance of any reading of the truth."""
    return any(
        abs(a - t) <= allowed * (max(Fraction(1), abs(t)) if relative else 1)
        for a in answer.readings()
        for t in truth.readings()
    )


def truth_text(truth: Any) -> str:
    """The answer of a truth: what it marks, else the whole of it."""
    text = str(truth)
    marked = marked_answer(text)
    return text if marked is None else marked


def equal(truth: str, answer: str) -> bool:
    """Whether the answer is the truth.  Raises RewardError for a truth that cannot be read."""
    expected, number = number_of(truth), number_of(answer)
    if expected is not None and number is not None:
        return expected.same(number)
    gold = parsed_truth(truth)
    if not answer.strip() or too_heavy(answer):
        return False
    return verified(gold, parsed(answer))


def equal_to_last(truth: str, response: str) -> bool:
    """Whether the last number (where the truth is one) or the last expression of the response is the truth."""
    expected = number_of(truth)
    if expected is not None:
        number = last_number(response)
        return number is not None and expected.same(number)
    gold = parsed_truth(truth)
    tail = response[-LONGEST:]
    return not too_heavy(tail) and verified(gold, parsed_text(tail))


def too_heavy(text: str) -> bool:
    return len(text) > LONGEST or _HEAVY.search(text) is not None


@lru_cache(maxsize=4096)
def parsed_truth(truth: str) -> tuple[Any, ...]:
    """Raises RewardError for a truth that math-verify cannot read."""
    found = parsed(truth)
    if not found:
        raise RewardError(
            f"math_answer: the truth {truth!r} is no number and no expression",
            fix="give the truth as a number, as LaTeX, or as a solution that ends with '#### N' or \\boxed{N}",
        )
    return found


def parsed(expression: str) -> tuple[Any, ...]:
    """What math-verify makes of one expression; nothing where it cannot read it."""
    return parsed_text(rf"$\boxed{{{plain(expression)}}}$")


def parsed_text(text: str) -> tuple[Any, ...]:
    """The last expressions in a text, by math-verify."""
    library = _library()
    found = library.parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    return tuple(found)


def verified(gold: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    if not found:
        return False
    return bool(_library().verify(list(gold), list(found), timeout_seconds=None))


@lru_cache(maxsize=1)
def _library() -> Any:
    library = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of its limits being off
    return library
