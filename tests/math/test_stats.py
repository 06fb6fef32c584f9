"""Intervals, quantiles and rank correlation against scipy."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import special as scipy_special
from scipy import stats as scipy_stats

from tutelage.errors import ConfigError, DataError, ShapeError
from tutelage.math.stats import (
    average_ranks,
    incomplete_beta,
    mean_interval,
    paired_interval,
    spearman,
    student_t_quantile,
    wilson_interval,
)


@pytest.mark.parametrize("a", [0.5, 1.0, 3.7, 40.0, 5000.0])
@pytest.mark.parametrize("b", [0.5, 2.0, 11.0, 800.0])
def test_incomplete_beta(a: float, b: float) -> None:
    for x in (0.0, 1e-6, 0.01, 0.3, 0.5, a / (a + b), 0.9, 0.999, 1.0):
        assert incomplete_beta(a, b, x) == pytest.approx(float(scipy_special.betainc(a, b, x)), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 29, 100, 999, 100_000, 10_000_000])
@pytest.mark.parametrize("p", [0.5, 0.75, 0.9, 0.975, 0.995, 0.9999])
def test_student_t_quantile(p: float, freedom: int) -> None:
    assert student_t_quantile(p, freedom) == pytest.approx(float(scipy_stats.t.ppf(p, freedom)), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("n", [2, 5, 40])
@pytest.mark.parametrize("level", [0.95, 0.8])
def test_mean_interval(n: int, level: float) -> None:
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    mean, low, high = mean_interval(x, level)
    assert mean == pytest.approx(x.numpy().mean())
    expected = scipy_stats.t.interval(level, n - 1, loc=x.numpy().mean(), scale=scipy_stats.sem(x.numpy()))
    assert (low, high) == pytest.approx(expected)


def test_mean_interval_by_hand_and_of_lists() -> None:
    # mean 2, s = 1, t_{0.975, 2} = 4.302653 (from the tables), half width 4.302653 / sqrt(3)
    assert mean_interval([1, 2, 3]) == pytest.approx((2.0, 2 - 2.484138, 2 + 2.484138), abs=1e-5)
    assert mean_interval([4.0, 4.0, 4.0]) == (4.0, 4.0, 4.0)
    assert mean_interval([3.5]) == (3.5, -math.inf, math.inf)


def test_paired_interval_is_that_of_the_t_test() -> None:
    random = torch.Generator().manual_seed(0)
    before = torch.randn(20, dtype=torch.float64, generator=random)
    after = before + 0.3 + 0.1 * torch.randn(20, dtype=torch.float64, generator=random)
    difference, low, high = paired_interval(after, before)
    expected = scipy_stats.ttest_rel(after.numpy(), before.numpy()).confidence_interval(0.95)
    assert (low, high) == pytest.approx((expected.low, expected.high))
    assert 0.2 < difference < 0.4
    assert low > 0


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (1, 1), (3, 10), (620, 1000), (1, 2312)])
def test_wilson_interval(k: int, n: int) -> None:
    expected = scipy_stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(k, n) == pytest.approx((k / n, expected.low, expected.high), abs=1e-12)


def test_wilson_takes_half_a_success() -> None:
    low, mid, high = (wilson_interval(k, 10) for k in (5, 5.5, 6))
    assert low[1] < mid[1] < high[1]
    assert mid[0] == 0.55


@pytest.mark.parametrize("ties", [False, True])
def test_spearman(ties: bool) -> None:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(30, dtype=torch.float64, generator=random)
    y = x + torch.randn(30, dtype=torch.float64, generator=random)
    if ties:
        x, y = x.round(), y.round()
    assert average_ranks(x).dtype == torch.float64
    assert torch.equal(average_ranks(x), torch.from_numpy(scipy_stats.rankdata(x.numpy())))
    assert spearman(x, y) == pytest.approx(float(scipy_stats.spearmanr(x.numpy(), y.numpy()).statistic), abs=1e-12)


def test_spearman_limits() -> None:
    assert spearman([1, 2, 3], [10, 100, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [5, 4, -9]) == pytest.approx(-1.0)
    assert math.isnan(spearman([1, 2, 3], [7, 7, 7]))
    assert math.isnan(spearman([], []))


def test_bad_input_is_refused() -> None:
    with pytest.raises(DataError):
        mean_interval([])
    with pytest.raises(DataError, match="1 values that are NaN"):
        mean_interval([1.0, math.nan])
    with pytest.raises(ShapeError):
        mean_interval(torch.zeros(2, 2))
    with pytest.raises(ShapeError, match="3 and 2"):
        paired_interval([1, 2, 3], [1, 2])
    for k, n in ((1, 0), (-1, 5), (6, 5)):
        with pytest.raises(DataError):
            wilson_interval(k, n)
    for p, freedom in ((0.4, 3), (1.0, 3), (0.9, 0)):
        with pytest.raises(ConfigError):
            student_t_quantile(p, freedom)
