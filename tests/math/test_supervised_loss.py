"""Losses of demonstrations against float64 references and values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tutelage.errors import ConfigError
from tutelage.math.supervised_loss import SUPERVISED_LOSSES, dft, nll, supervised_loss


def test_nll_is_minus_the_logprob_with_gradient_minus_one():
    logp = torch.tensor([-0.5, -2.0], requires_grad=True)
    nll(logp).sum().backward()
    assert nll(logp).tolist() == [0.5, 2.0]
    assert logp.grad is not None
    assert logp.grad.tolist() == [-1.0, -1.0]


def test_dft_by_hand():
    """p = 1/2 and 1/4: -p log p is log(2)/2 and log(4)/4."""
    loss = dft(torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64))
    assert loss.tolist() == pytest.approx([math.log(2) / 2, math.log(4) / 4], abs=1e-12)


def test_the_gradient_of_dft_does_not_pass_through_its_weight():
    """By logits: -p (onehot - softmax), not the gradient of -p log p."""
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([0, 3, 6, 2, 2])
    dft(torch.log_softmax(logits, 1).gather(1, target[:, None]).squeeze(1)).sum().backward()
    p = torch.softmax(logits.detach(), 1)
    for row, y in enumerate(target.tolist()):
        for v in range(7):
            want = -p[row, y] * ((1.0 if v == y else 0.0) - p[row, v])
            assert logits.grad is not None
            assert float(logits.grad[row, v]) == pytest.approx(float(want), abs=1e-12)


def test_no_two_losses_are_aliases_and_half_precision_is_widened():
    logp = torch.tensor([-1.0, -3.0])
    assert float((nll(logp) - dft(logp)).abs().max()) > 1e-3
    assert all(loss(logp.bfloat16()).dtype == torch.float32 for loss in SUPERVISED_LOSSES.values())


def test_an_unknown_loss_is_refused_with_the_closest_name():
    with pytest.raises(ConfigError, match="Did you mean dft"):
        supervised_loss("dtf", torch.zeros(1))
