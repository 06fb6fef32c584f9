"""Accuracy of answers that a rule can judge: pass@k, and intervals that hold near 0 and 1.

Shapes: P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from tutelage.errors import DataError
from tutelage.math.stats import mean_interval, paired_interval, wilson_interval

PerPrompt = Sequence[float | None]
"""One number a prompt; None: no answer to it has a score."""


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The chance that one of k answers, drawn without return from `answers` of which `right` are right, is right.

        pass@k = 1 - C(answers - right, k) / C(answers, k)     (Chen et al. 2021, arXiv:2107.03374, eq. 1)

    The unbiased estimator; 1 - (1 - right / answers)^k is biased.  Raises DataError unless 1 <= k <= answers and
    0 <= right <= answers.
    """
    if not (1 <= k <= answers and 0 <= right <= answers):
        raise DataError(
            f"pass@{k} of {right} right answers among {answers}", fix="k is from 1 to the number of answers"
        )
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def mean_of(values: PerPrompt) -> float:
    """Over the prompts that have a value; NaN where none has."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan


def interval(values: PerPrompt) -> dict[str, float]:
    """mean, low and high: 95 % over prompts.

    Wilson's score interval where every value is 0 or 1, which does not shrink to nothing at a rate of 0; else
    Student's t.  Without bounds for one prompt that is neither.
    """
    known = [value for value in values if value is not None]
    if known and all(value in (0.0, 1.0) for value in known):
        return _named(*wilson_interval(sum(known), len(known)))
    if len(known) > 1:
        return _named(*mean_interval(known))
    return {"mean": mean_of(known)}


def change(after: PerPrompt, before: PerPrompt) -> dict[str, float] | None:
    """mean, low and high of after - before on the same prompts, 95 %; None where fewer than two have both.

    Where every value is 0 or 1: Newcombe's interval for paired proportions; else Student's t of the differences.
    """
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if a is not None and b is not None]
    if len(pairs) < 2:
        return None
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    if all(value in (0.0, 1.0) for value in [*first, *second]):
        return _named(*paired_proportions(first, second))
    return _named(*paired_interval(first, second))


def paired_proportions(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """(difference of the rates, low, high), 95 %: method 10 of Newcombe 1998 (Statistics in Medicine 17, 2635-2650).

        low  = d - sqrt((p1 - l1)^2 - 2 phi (p1 - l1) (u2 - p2) + (u2 - p2)^2)
        high = d + sqrt((u1 - p1)^2 - 2 phi (u1 - p1) (p2 - l2) + (p2 - l2)^2)

    l and u: Wilson's interval of each rate.  phi: the correlation of the pairs, its numerator a d - b c taken as
    max(a d - b c - n / 2, 0) where it is positive; 0 where a margin is empty.  a: both 1; b, c: one of them;
    d: none.  first, second: P values of 0 or 1.
    """
    n = len(first)
    both = sum(x * y for x, y in zip(first, second, strict=True))
    only_first, only_second = sum(first) - both, sum(second) - both
    neither = n - both - only_first - only_second
    p1, l1, u1 = wilson_interval(sum(first), n)
    p2, l2, u2 = wilson_interval(sum(second), n)
    product = both * neither - only_first * only_second
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    top = max(product - n / 2, 0.0) if product > 0 else product
    phi = top / math.sqrt(margins) if margins else 0.0
    below = (p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2
    above = (u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2
    return p1 - p2, p1 - p2 - math.sqrt(max(below, 0.0)), p1 - p2 + math.sqrt(max(above, 0.0))


def _named(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "low": low, "high": high}
