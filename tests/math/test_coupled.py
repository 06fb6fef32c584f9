"""The coupled-loss rule: one gradient, however the mini-batch is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tutelage.errors import ShapeError, TrainingError
from tutelage.math.coupled import coupled_loss, surrogate

ITEMS, FEATURES = 12, 3


def kto_like(scalars_N: Tensor) -> Tensor:
    """A sigmoid around a baseline that is a clamped batch mean, with gradient through the baseline."""
    label_N = torch.where(torch.arange(len(scalars_N)) % 3 > 0, 1.0, -1.0).double()
    baseline = scalars_N.mean().clamp(min=0.0)
    return (1.0 - torch.sigmoid(label_N * (scalars_N - baseline))).mean()


def aot_like(scalars_NK: Tensor) -> Tensor:
    """Sorted chosen against sorted rejected scores: every item's partner depends on all the others."""
    chosen, rejected = scalars_NK[:, 0].sort().values, scalars_NK[:, 1].sort().values
    return torch.nn.functional.softplus(rejected - chosen).mean()


def case(columns: int) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor], Tensor]:
    """(parameters, the scalars of given items as a nonlinear function of them, the items)."""
    random = torch.Generator().manual_seed(4)
    weight = torch.randn(FEATURES, 2, dtype=torch.float64, generator=random)
    items = torch.randn(ITEMS, 2, FEATURES, dtype=torch.float64, generator=random)

    def scalars(weight_: Tensor, part: Tensor) -> Tensor:
        pair = torch.tanh(torch.einsum("nkf,fk->nk", part, weight_)) + 0.3
        return pair if columns == 2 else pair[:, 0]

    return weight, scalars, items


CUTS = [[12], [1] * 12, [5, 7], [3, 1, 8], [4, 4, 4]]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("loss", "columns"), [(kto_like, 1), (aot_like, 2)])
def test_the_gradient_is_that_of_the_whole_batch_for_any_cut(
    loss: Callable[[Tensor], Tensor], columns: int, cut: list[int]
) -> None:
    weight, scalars, items = case(columns)
    leaf = weight.clone().requires_grad_(True)
    whole = loss(scalars(leaf, items))
    (expected,) = torch.autograd.grad(whole, leaf)

    with torch.no_grad():
        gathered = torch.cat([scalars(weight, part) for part in items.split(cut)])
        value, derivative = coupled_loss(gathered, loss)
    leaf = weight.clone().requires_grad_(True)
    for part, slopes in zip(items.split(cut), derivative.split(cut), strict=True):
        surrogate(scalars(leaf, part), slopes).backward()  # gradients are summed
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(value, whole.detach(), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("loss", "columns"), [(kto_like, 1), (aot_like, 2)])
def test_naive_micro_batching_gives_another_gradient(loss: Callable[[Tensor], Tensor], columns: int) -> None:
    weight, scalars, items = case(columns)
    leaf = weight.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(loss(scalars(leaf, items)), leaf)
    naive = sum(torch.autograd.grad(loss(scalars(leaf, part)) / 2, leaf)[0] for part in items.split([6, 6]))
    assert (torch.as_tensor(naive) - expected).abs().max() > 1e-3


def test_value_and_derivative_by_hand() -> None:
    # L = (sum s)^2: dL/ds_i = 2 sum s
    value, derivative = coupled_loss(torch.tensor([1.0, 2.0, 3.0]), lambda s: s.sum().square())
    assert value.item() == 36.0
    assert derivative.tolist() == [12.0, 12.0, 12.0]
    assert not value.requires_grad
    assert not derivative.requires_grad


def test_scalars_are_constants_and_the_surrogate_stops_the_derivative() -> None:
    scalars = torch.tensor([1.0, 2.0], requires_grad=True)
    slopes = torch.tensor([3.0, -1.0], requires_grad=True)
    coupled_loss(scalars, lambda s: s.square().sum())
    assert scalars.grad is None
    surrogate(scalars, slopes).backward()
    assert slopes.grad is None
    assert scalars.grad is not None
    assert scalars.grad.tolist() == [3.0, -1.0]


def test_gradcheck_of_the_derivative() -> None:
    scalars = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, derivative = coupled_loss(scalars, kto_like)
    for i in range(5):
        step = torch.zeros(5, dtype=torch.float64)
        step[i] = 1e-6
        slope = (kto_like(scalars + step) - kto_like(scalars - step)) / 2e-6
        assert derivative[i].item() == pytest.approx(slope.item(), abs=1e-8)


def test_misuse_is_refused() -> None:
    with pytest.raises(ShapeError, match="scalar"):
        coupled_loss(torch.ones(3), lambda s: s * 2)
    with pytest.raises(TrainingError, match="does not depend"):
        coupled_loss(torch.ones(3), lambda s: s.detach().sum())
    with pytest.raises(ShapeError):
        surrogate(torch.ones(3), torch.ones(3, 1))
