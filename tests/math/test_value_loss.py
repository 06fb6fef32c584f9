"""The clipped value loss, by hand and against scalar Python."""

from __future__ import annotations

import math

import pytest
import torch

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.value_loss import clipped_value_loss


def test_by_hand() -> None:
    # clip 0.5 around 1: 3 -> 1.5, -1 -> 0.5, 1.2 stays
    value = torch.tensor([3.0, 3.0, -1.0, 1.2], requires_grad=True)
    ret = torch.tensor([4.0, 1.0, -3.0, 0.0])
    terms = clipped_value_loss(value, torch.ones(4), ret, 0.5)
    # (3-4)^2 = 1 < (1.5-4)^2 = 6.25 | (3-1)^2 = 4 > 0.25 | (-1+3)^2 = 4 < (0.5+3)^2 = 12.25 | 1.44 both
    assert terms.loss.tolist() == pytest.approx([3.125, 2.0, 6.125, 0.72])
    assert terms.clipped.tolist() == [True, False, True, False]
    terms.loss.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == pytest.approx([0.0, 2.0, 0.0, 1.2])


def test_against_scalars_in_float64() -> None:
    random = torch.Generator().manual_seed(0)
    value, old, ret = (torch.randn(4, 5, dtype=torch.float64, generator=random) for _ in range(3))
    terms = clipped_value_loss(value, old, ret, 0.2)
    for v, o, r, loss in zip(*(x.flatten().tolist() for x in (value, old, ret, terms.loss)), strict=True):
        held = min(max(v, o - 0.2), o + 0.2)
        assert loss == pytest.approx(0.5 * max((v - r) ** 2, (held - r) ** 2), abs=1e-12)
    assert terms.clipped.any()
    assert not terms.clipped.all()


def test_without_a_clip_it_is_half_the_squared_error_and_old_values_are_not_read() -> None:
    value, ret = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 1.0])
    terms = clipped_value_loss(value, torch.full((2,), math.nan), ret, None)
    assert terms.loss.tolist() == [2.0, 4.5]
    assert not terms.clipped.any()
    assert torch.equal(clipped_value_loss(value, torch.zeros(2), ret, 1e9).loss, terms.loss)


def test_gradcheck_and_no_gradient_to_targets() -> None:
    random = torch.Generator().manual_seed(1)
    value, old, ret = (torch.randn(6, dtype=torch.float64, generator=random).requires_grad_(True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, ret, 0.3).loss, value)
    clipped_value_loss(value, old, ret, 0.3).loss.sum().backward()
    assert old.grad is None
    assert ret.grad is None
    assert clipped_value_loss(value.bfloat16(), old.bfloat16(), ret.bfloat16(), 0.3).loss.dtype == torch.float32


def test_bad_arguments_are_refused() -> None:
    x = torch.zeros(2)
    for clip in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="value clip range"):
            clipped_value_loss(x, x, x, clip)
    with pytest.raises(ShapeError, match="ret"):
        clipped_value_loss(x, x, torch.zeros(2, 1), 0.2)
