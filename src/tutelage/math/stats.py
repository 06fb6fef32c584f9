"""Means, rates and their 95 % confidence intervals, for reports. Plain floats out; needs no scipy.

Inputs are any sequence of numbers or a one-dimensional tensor, computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from tutelage.errors import ConfigError, DataError, ShapeError

Numbers = Sequence[float] | Tensor


def _vector(x: Numbers, name: str) -> Tensor:
    vector = torch.as_tensor(x).detach().to("cpu", torch.float64)
    if vector.dim() != 1:
        raise ShapeError(f"{name} has shape {tuple(vector.shape)}", fix="pass one number per observation")
    if not torch.isfinite(vector).all():
        raise DataError(f"{name} holds {int((~torch.isfinite(vector)).sum())} values that are NaN or infinite")
    return vector


def _pair(x: Numbers, y: Numbers) -> tuple[Tensor, Tensor]:
    a, b = _vector(x, "the first sample"), _vector(y, "the second sample")
    if len(a) != len(b):
        raise ShapeError(
            f"samples of {len(a)} and {len(b)} values", fix="pair every value with one of the other sample"
        )
    return a, b


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), 0 <= x <= 1, a and b > 0.

    The continued fraction DLMF 8.17.22, by the modified Lentz method, on the side of the mean where it converges fast
    (I_x(a, b) = 1 - I_{1-x}(b, a) on the other).
    """
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    upper, lower, fraction = 1.0, 0.0, 1.0
    for index in range(10_000):
        m = index // 2
        if index == 0:
            coefficient = 1.0
        elif index % 2 == 0:
            coefficient = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            coefficient = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        lower = 1.0 / ((1.0 + coefficient * lower) or tiny)
        upper = (1.0 + coefficient / upper) or tiny
        fraction *= upper * lower
        if index > 0 and abs(upper * lower - 1.0) < 1e-15:
            break
    return math.exp(log_front) * (fraction - 1.0) / a


@lru_cache(maxsize=256)
def student_t_quantile(p: float, freedom: int) -> float:
    """t with P(T <= t) = p for Student's t with `freedom` degrees of freedom, 0.5 <= p < 1; by bisection.

    P(|T| <= t) = I_x(1/2, freedom / 2),  x = t^2 / (freedom + t^2)   (Abramowitz and Stegun 26.7.1)
    """
    if freedom < 1 or not 0.5 <= p < 1.0:
        raise ConfigError(
            f"no t quantile for p = {p} with {freedom} degrees of freedom", fix="0.5 <= p < 1, at least 1"
        )
    if p == 0.5:
        return 0.0
    inside = 2.0 * p - 1.0

    def below(t: float) -> bool:
        return incomplete_beta(0.5, freedom / 2.0, t * t / (freedom + t * t)) < inside

    low, high = 0.0, 1.0
    while below(high):
        low, high = high, 2.0 * high
    while (middle := 0.5 * (low + high)) not in (low, high):
        low, high = (middle, high) if below(middle) else (low, middle)
    return high


def mean_interval(x: Numbers, level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): mean -+ t_{(1 + level) / 2, n - 1} * s / sqrt(n), s the sample standard deviation.

    Student's interval for independent observations. One observation gives minus and plus infinity.
    Raises DataError for no observation, or NaN and infinities among them.
    """
    vector = _vector(x, "the sample")
    n = len(vector)
    if n == 0:
        raise DataError("a mean of no values", fix="pass at least one value")
    mean = float(vector.mean())
    if n == 1:
        return mean, -math.inf, math.inf
    half = student_t_quantile((1.0 + level) / 2.0, n - 1) * float(vector.std(correction=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def paired_interval(a: Numbers, b: Numbers, level: float = 0.95) -> tuple[float, float, float]:
    """`mean_interval` of the differences a_i - b_i (after - before on the same prompts: a is after).

    Raises ShapeError when the lengths differ, DataError as `mean_interval`.
    """
    first, second = _pair(a, b)
    return mean_interval(first - second, level)


def wilson_interval(successes: float, n: int, level: float = 0.95) -> tuple[float, float, float]:
    """(rate, low, high) of a proportion: the score interval of Wilson (1927), z the normal quantile of (1 + level) / 2.

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),    p = successes / n

    `successes` may be half a count (a tie). Raises DataError unless n >= 1 and 0 <= successes <= n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise DataError(f"{successes} successes in {n} trials", fix="pass at least one trial and no more successes")
    rate, z = successes / n, NormalDist().inv_cdf((1.0 + level) / 2.0)
    centre = rate + z * z / (2 * n)
    half = z * math.sqrt(rate * (1.0 - rate) / n + z * z / (4 * n * n))
    scale = 1.0 + z * z / n
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == n else (centre + half) / scale
    return rate, low, high


def average_ranks(x: Numbers) -> Tensor:
    """Ranks from 1, equal values sharing the mean of their ranks; float64."""
    _, group, counts = torch.unique(_vector(x, "the sample"), return_inverse=True, return_counts=True)
    counts = counts.double()
    return (counts.cumsum(0) - (counts - 1.0) / 2.0)[group]


def spearman(x: Numbers, y: Numbers) -> float:
    """Spearman's rank correlation: Pearson's correlation of the average ranks, in [-1, 1]; NaN when a side is constant.

    Raises ShapeError when the lengths differ, DataError for NaN or infinities.
    """
    first, second = _pair(x, y)
    a, b = average_ranks(first), average_ranks(second)
    a, b = a - a.mean(), b - b.mean()
    scale = float((a.square().sum() * b.square().sum()).sqrt()) if len(a) else 0.0
    return float((a * b).sum()) / scale if scale > 0 else math.nan
