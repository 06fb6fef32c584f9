"""k3 times the importance ratio: the KL of the policy now, from tokens of the policy before its updates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tutelage.math.kl import kl_k3, kl_k3_importance, kl_loss

LOGITS = torch.tensor([0.3, -1.0, 0.9, 0.1], dtype=torch.float64)
OLD_LOGITS = torch.tensor([-0.4, 0.8, 0.2, 0.5], dtype=torch.float64)
REF_LOGITS = torch.tensor([1.0, 0.2, -0.7, 0.0], dtype=torch.float64)


def expectation(kind: str, drawn_from: Tensor) -> tuple[float, list[float]]:
    """(value, gradient by the logits) of the loss over draws from a policy that is not differentiated."""
    logits = LOGITS.clone().requires_grad_(True)
    old, ref = torch.log_softmax(OLD_LOGITS, -1), torch.log_softmax(REF_LOGITS, -1)
    each = kl_loss(kind, torch.log_softmax(logits, -1), ref, old_logp=old)
    value = (torch.softmax(drawn_from, -1) * each).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    return float(value.detach()), gradient.tolist()


def exact() -> tuple[float, list[float]]:
    """KL(pi || ref) and, by hand, pi_j (d_j - KL)."""
    p, q = (torch.softmax(x, -1).tolist() for x in (LOGITS, REF_LOGITS))
    d = [math.log(a / b) for a, b in zip(p, q, strict=True)]
    kl = sum(a * x for a, x in zip(p, d, strict=True))
    return kl, [a * (x - kl) for a, x in zip(p, d, strict=True)]


def test_on_tokens_of_the_old_policy_value_and_gradient_are_those_of_the_kl_now() -> None:
    value, gradient = expectation("k3_importance", OLD_LOGITS)
    kl, slope = exact()
    assert value == pytest.approx(kl, abs=1e-12)
    assert gradient == pytest.approx(slope, abs=1e-12)
    for other in ("k2", "k3", "k3_unbiased"):
        assert max(abs(a - b) for a, b in zip(expectation(other, OLD_LOGITS)[1], slope, strict=True)) > 1e-2, other


def test_on_tokens_of_the_policy_itself_it_needs_no_old_logprobs() -> None:
    logits = LOGITS.clone().requires_grad_(True)
    logp, ref = torch.log_softmax(logits, -1), torch.log_softmax(REF_LOGITS, -1)
    value = (torch.softmax(LOGITS, -1) * kl_k3_importance(logp, ref)).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    kl, slope = exact()
    assert float(value.detach()) == pytest.approx(kl, abs=1e-12)
    assert gradient.tolist() == pytest.approx(slope, abs=1e-12)


def test_by_hand_and_that_old_logprobs_get_no_gradient() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    logp = torch.tensor([half, quarter], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([quarter, half], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([quarter, half], dtype=torch.float64)
    found = kl_loss("k3_importance", logp, ref, old_logp=old)
    k3 = [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]
    assert found.tolist() == pytest.approx([2 * k3[0], 0.5 * k3[1]])
    assert kl_k3(logp.detach(), ref).tolist() == pytest.approx(k3)
    found.sum().backward()
    assert old.grad is None
    assert logp.grad is not None
    assert torch.autograd.gradcheck(lambda x: kl_k3_importance(x, ref, 20.0, old.detach()), logp)
