"""Masked statistics and aggregation weights against plain Python over the tokens that count."""

from __future__ import annotations

import statistics

import pytest
import torch

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.masking import (
    AGGREGATIONS,
    aggregation_weights,
    last_true,
    masked_mean,
    masked_sum,
    masked_var,
    weighted_sum,
)

NAN = float("nan")
HOLES = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]])


def real_values(x: torch.Tensor, mask: torch.Tensor) -> list[float]:
    return [v for row, keep in zip(x.tolist(), mask.tolist(), strict=True) for v, k in zip(row, keep, strict=True) if k]


def test_masked_statistics_are_those_of_the_real_tokens() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = real_values(x, HOLES)
    assert len(values) == 5
    assert masked_sum(x, HOLES).item() == pytest.approx(sum(values), abs=1e-12)
    assert masked_mean(x, HOLES).item() == pytest.approx(statistics.mean(values), abs=1e-12)
    assert masked_var(x, HOLES).item() == pytest.approx(statistics.variance(values), abs=1e-12)


def test_masked_statistics_by_hand() -> None:
    x = torch.tensor([[1.0, NAN, 3.0], [8.0, float("inf"), NAN]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    assert masked_sum(x, mask) == 12.0  # 1 + 3 + 8
    assert masked_mean(x, mask) == 4.0  # 12 / 3
    assert masked_var(x, mask) == 13.0  # (9 + 1 + 16) / 2


def test_masks_may_be_bool_integer_or_float_and_flags_can_be_averaged() -> None:
    clipped = torch.tensor([[True, False, True, True]])
    for dtype in (torch.bool, torch.int64, torch.float32):
        mask = torch.tensor([[1, 1, 0, 1]]).to(dtype)
        assert masked_mean(clipped, mask).item() == pytest.approx(2 / 3)


def test_half_precision_is_summed_in_float32() -> None:
    x = torch.ones(1, 5000, dtype=torch.bfloat16)  # bfloat16 has no 5000
    assert masked_sum(x, torch.ones(1, 5000)).item() == 5000.0


def test_an_empty_mask_gives_zero_and_one_token_has_no_variance() -> None:
    x = torch.full((2, 3), NAN)
    none = torch.zeros(2, 3)
    assert masked_sum(x, none) == 0
    assert masked_mean(x, none) == 0
    assert masked_var(x, none) == 0
    assert masked_mean(torch.zeros(0, 3), torch.zeros(0, 3)) == 0
    one = torch.tensor([[0, 1, 0]])
    assert masked_var(torch.tensor([[NAN, 7.0, NAN]]), one) == 0


def test_masked_mean_passes_gradient_to_real_tokens_only() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: masked_mean(v, HOLES), x)
    assert torch.autograd.gradcheck(lambda v: masked_var(v, HOLES), x)
    masked_mean(x, HOLES).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, HOLES.double() / 5)


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"x \(2, 3\), mask \(2, 1\)"):
        masked_sum(torch.zeros(2, 3), torch.ones(2, 1))


def test_last_true_is_the_last_one_not_the_count() -> None:
    assert last_true(HOLES).tolist() == [3, -1, 1]
    assert last_true(HOLES.bool()).tolist() == [3, -1, 1]
    assert last_true(torch.zeros(2, 0)).tolist() == [-1, -1]
    with pytest.raises(ShapeError):
        last_true(torch.ones(3))


def test_aggregation_weights_by_hand() -> None:
    # rows have 3, 0 and 2 real tokens: N = 5, B' = 2, B = 3
    expected = {
        "token_mean": (1 / 5, 1 / 5),
        "seq_mean_token_mean": (1 / (2 * 3), 1 / (2 * 2)),
        "seq_mean_token_sum": (1 / 2, 1 / 2),
        "constant_horizon": (1 / (3 * 10), 1 / (3 * 10)),
    }
    assert set(expected) == set(AGGREGATIONS)
    for kind, (first, third) in expected.items():
        weight = aggregation_weights(HOLES, kind, horizon=10)
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight[0], torch.tensor([first, 0, first, first, 0]))
        assert torch.equal(weight[1], torch.zeros(5))
        torch.testing.assert_close(weight[2], torch.tensor([third, third, 0, 0, 0]))


@pytest.mark.parametrize(
    ("kind", "total"),
    [
        ("token_mean", 1.0),
        ("seq_mean_token_mean", 1.0),
        ("seq_mean_token_sum", 5 / 2),
        ("constant_horizon", 5 / (3 * 10)),
    ],
)
def test_aggregation_weights_have_the_documented_sum(kind: str, total: float) -> None:
    assert aggregation_weights(HOLES, kind, horizon=10).sum().item() == pytest.approx(total, rel=1e-6)


def test_filler_rows_change_sequence_means_not_at_all_and_the_constant_horizon_by_its_b() -> None:
    padded = torch.cat([HOLES, torch.zeros(2, 5, dtype=HOLES.dtype)])
    for kind in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        assert torch.equal(aggregation_weights(padded, kind)[:3], aggregation_weights(HOLES, kind))
    constant = aggregation_weights(padded, "constant_horizon", 10)[:3] / aggregation_weights(
        HOLES, "constant_horizon", 10
    )
    torch.testing.assert_close(constant[HOLES == 1], torch.full((5,), 3 / 5))


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_weights_of_nothing_are_zero(kind: str) -> None:
    assert torch.equal(aggregation_weights(torch.zeros(2, 3), kind, 4), torch.zeros(2, 3))
    assert aggregation_weights(torch.zeros(0, 3), kind, 4).shape == (0, 3)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_weighted_loss_does_not_depend_on_how_the_batch_is_cut(kind: str) -> None:
    loss = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = aggregation_weights(HOLES, kind, 10).double()
    whole = weighted_sum(loss, weight)
    parts = sum(weighted_sum(loss[i : i + 1], weight[i : i + 1]) for i in range(3))
    torch.testing.assert_close(whole, torch.as_tensor(parts), rtol=0, atol=1e-15)
    by_hand = sum(v * w for v, w in zip(loss.flatten().tolist(), weight.flatten().tolist(), strict=True))
    assert whole.item() == pytest.approx(by_hand, abs=1e-12)


def test_weighted_sum_reads_nothing_where_the_weight_is_zero() -> None:
    loss = torch.tensor([[2.0, NAN, float("inf")]], requires_grad=True)
    total = weighted_sum(loss, torch.tensor([[0.5, 0.0, 0.0]]))
    total.backward()
    assert total.item() == 1.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [[0.5, 0.0, 0.0]]


def test_unknown_aggregations_and_bad_horizons_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean token_mean"):
        aggregation_weights(HOLES, "token_means")
    for horizon in (None, 0, -3):
        with pytest.raises(ConfigError, match="horizon"):
            aggregation_weights(HOLES, "constant_horizon", horizon)
