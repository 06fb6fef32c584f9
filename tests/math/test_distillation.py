"""Distillation divergences against loops over the vocabulary in float64, exact KL, limits and derivatives."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.distillation import (
    DIVERGENCES,
    distillation_loss,
    less_others_at_position,
    reverse_kl_returns,
    with_tail,
)
from tutelage.math.kl import exact_kl
from tutelage.math.logprobs import Asked, distribution_outputs

N, V = 6, 9


def logits(seed: int, rows: int = N, tokens: int = V) -> Tensor:
    return 2 * torch.randn(rows, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def candidates(student: Tensor, teacher: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Logprobs of the teacher's `count` likeliest tokens under both."""
    q = torch.log_softmax(teacher, -1)
    top, ids = q.topk(count, dim=-1)
    return torch.log_softmax(student, -1).gather(1, ids), top


def by_hand(kind: str, p: list[float], q: list[float], beta: float) -> float:
    """From the papers: P is the teacher (q here), Q the student (p here), in loops."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * (math.log(x) - math.log(y)) for x, y in zip(a, b, strict=True) if x > 0)

    m = [beta * t + (1 - beta) * s for s, t in zip(p, q, strict=True)]
    return {"forward_kl": kl(q, p), "reverse_kl": kl(p, q), "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m)}[kind]


# ---- values ----


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("count", [1, 3, V])
def test_values_are_those_of_loops_over_candidates_and_one_tail(kind: str, count: int) -> None:
    student, teacher = logits(1), logits(2)
    terms = distillation_loss(kind, *candidates(student, teacher, count), 0.3)
    p_NV, q_NV = torch.softmax(student, -1), torch.softmax(teacher, -1)
    for n in range(N):
        order = sorted(range(V), key=lambda v, n=n: -float(q_NV[n, v]))
        p, q = [[float(x[n, v]) for v in order[:count]] for x in (p_NV, q_NV)]
        p_tail, q_tail = [float(sum(x[n, v] for v in order[count:])) for x in (p_NV, q_NV)]
        if count < V:
            p, q = [*p, p_tail], [*q, q_tail]
        assert float(terms.loss[n]) == pytest.approx(by_hand(kind, p, q, 0.3), abs=1e-12)
        assert float(terms.tail[n]) == pytest.approx(p_tail, abs=1e-12)
        assert float(terms.teacher_tail[n]) == pytest.approx(q_tail, abs=1e-12)


def test_hand_values_of_a_coin() -> None:
    """Student 1/2 1/2, teacher 1/4 3/4."""
    p, q = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    found = {kind: float(distillation_loss(kind, p, q, 0.5).loss) for kind in DIVERGENCES}
    assert found["reverse_kl"] == pytest.approx(0.5 * math.log(4 / 3), abs=1e-9)
    assert found["forward_kl"] == pytest.approx(0.75 * math.log(3) - math.log(2), abs=1e-9)
    m = (0.375, 0.625)
    jsd = 0.5 * (0.25 * math.log(0.25 / m[0]) + 0.75 * math.log(0.75 / m[1]))
    jsd += 0.5 * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    assert found["jsd"] == pytest.approx(jsd, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_tokens_as_candidates_are_the_exact_kl(dtype: torch.dtype) -> None:
    student, teacher = logits(3).to(dtype), logits(4).to(dtype)
    pair = candidates(student, teacher, V)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-13
    reverse, forward = (distillation_loss(kind, *pair).loss for kind in ("reverse_kl", "forward_kl"))
    torch.testing.assert_close(reverse, exact_kl(student, teacher), rtol=0, atol=tolerance)
    torch.testing.assert_close(forward, exact_kl(teacher, student), rtol=0, atol=tolerance)


def test_all_tokens_as_candidates_have_the_gradient_of_the_exact_kl_in_float32_too() -> None:
    teacher = logits(4).float()
    for kind, exact in (("reverse_kl", exact_kl), ("forward_kl", lambda s, t: exact_kl(t, s))):
        student = logits(3).float().requires_grad_()
        ours = torch.autograd.grad(distillation_loss(kind, *candidates(student, teacher, V)).loss.sum(), student)[0]
        theirs = torch.autograd.grad(exact(student, teacher).sum(), student)[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6)


def test_the_gradient_of_the_forward_kl_is_student_minus_teacher() -> None:
    student, teacher = logits(5).requires_grad_(), logits(6)
    (gradient,) = torch.autograd.grad(
        distillation_loss("forward_kl", *candidates(student, teacher, V)).loss.sum(), student
    )
    torch.testing.assert_close(gradient, torch.softmax(student, -1) - torch.softmax(teacher, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_fewer_candidates_are_a_lower_bound_that_grows_to_the_exact_value(kind: str) -> None:
    student, teacher = logits(7, 50), logits(8, 50)
    found = [distillation_loss(kind, *candidates(student, teacher, count), 0.4).loss for count in range(1, V + 1)]
    for fewer, more in itertools.pairwise(found):
        assert bool((fewer <= more + 1e-12).all())
    assert float((found[-1] - found[0]).min()) > 1e-3


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("count", [2, V])
def test_equal_models_have_divergence_and_gradient_0(kind: str, count: int) -> None:
    student = logits(9).requires_grad_()
    loss = distillation_loss(kind, *candidates(student, student.detach(), count)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert float(loss.detach().abs().max()) < 1e-14
    assert float(gradient.abs().max()) < 1e-14


def test_the_jsd_has_both_kls_as_limits_and_is_symmetric_in_its_middle() -> None:
    student, teacher = logits(10), logits(11)
    pair = candidates(student, teacher, 4)
    beta = 1e-6
    near_forward = distillation_loss("jsd", *pair, beta).loss / beta
    near_reverse = distillation_loss("jsd", *pair, 1 - beta).loss / beta
    torch.testing.assert_close(near_forward, distillation_loss("forward_kl", *pair).loss, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(near_reverse, distillation_loss("reverse_kl", *pair).loss, rtol=1e-3, atol=1e-5)
    swapped = distillation_loss("jsd", pair[1], pair[0], 0.5).loss
    torch.testing.assert_close(distillation_loss("jsd", *pair, 0.5).loss, swapped)
    bound = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)
    assert float(distillation_loss("jsd", *pair, 0.3).loss.max()) < bound


def test_no_two_names_are_aliases() -> None:
    pair = candidates(logits(12), logits(13), 4)
    found = {kind: distillation_loss(kind, *pair, 0.5).loss for kind in DIVERGENCES}
    found["jsd 0.1"] = distillation_loss("jsd", *pair, 0.1).loss
    for one, other in itertools.combinations(found, 2):
        assert float((found[one] - found[other]).abs().max()) > 1e-3, (one, other)


# ---- derivatives and edges ----


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("count", [3, V - 1])
def test_gradcheck_by_the_logits_of_the_student(kind: str, count: int) -> None:
    teacher = logits(15, 3)

    def loss(student: Tensor) -> Tensor:
        return distillation_loss(kind, *candidates(student, teacher, count), 0.3).loss

    assert torch.autograd.gradcheck(loss, logits(14, 3).requires_grad_())


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = logits(16).requires_grad_(), logits(17).requires_grad_()
    for kind in DIVERGENCES:
        loss = distillation_loss(kind, *candidates(student, teacher, 3)).loss.sum()
        assert torch.autograd.grad(loss, teacher, allow_unused=True, retain_graph=True)[0] is None
        assert torch.autograd.grad(loss, student)[0].abs().max() > 0


def test_tokens_that_neither_can_say_contribute_nothing() -> None:
    """Rows of the output layer that are switched off with minus infinity."""
    student, teacher = logits(18), logits(19)
    student[:, -1] = teacher[:, -1] = -math.inf
    for kind in DIVERGENCES:
        leaf = student.clone().requires_grad_()
        loss = distillation_loss(kind, *candidates(leaf, teacher, V), 0.3).loss
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        assert bool(torch.isfinite(gradient).all())
        without = distillation_loss(kind, *candidates(student[:, :-1], teacher[:, :-1], V - 1), 0.3).loss
        torch.testing.assert_close(loss.detach(), without, rtol=0, atol=1e-12)


def test_the_tail_is_the_rest_and_never_below_what_a_sum_near_1_can_tell() -> None:
    rows = torch.tensor([[0.5, 0.25], [0.5, 0.5], [0.6, 0.4000001]]).log()
    found = with_tail(rows)[:, -1].exp()
    assert found.tolist() == pytest.approx([0.25, 2.0**-23, 2.0**-23], rel=1e-5)
    assert distillation_loss("reverse_kl", rows, rows).loss.tolist() == pytest.approx([0, 0, 0], abs=1e-7)


def test_candidates_of_the_output_layer_are_what_the_loss_reads() -> None:
    q = torch.log_softmax(logits(20), -1)
    found = distribution_outputs(q, torch.zeros(N, dtype=torch.int64), Asked(top=4))
    p = torch.log_softmax(logits(21), -1)
    own = distribution_outputs(p, torch.zeros(N, dtype=torch.int64), Asked(candidates=found["top_ids"]))
    ours = distillation_loss("reverse_kl", own["candidate_logp"], found["top_logp"]).loss
    torch.testing.assert_close(ours, distillation_loss("reverse_kl", *candidates(logits(21), logits(20), 4)).loss)


def test_wrong_arguments_are_refused() -> None:
    pair = candidates(logits(1), logits(2), 3)
    with pytest.raises(ConfigError, match="'reverse-kl' is not a divergence"):
        distillation_loss("reverse-kl", *pair)
    for beta in (0.0, 1.0):
        with pytest.raises(ConfigError, match="beta is"):
            distillation_loss("jsd", *pair, beta)
    with pytest.raises(ShapeError):
        distillation_loss("jsd", pair[0], pair[1][:, :2])
    with pytest.raises(ConfigError, match="discount is 2"):
        reverse_kl_returns(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), 2.0)


# ---- sampled tokens ----


def test_returns_by_hand_and_nothing_under_the_mask_is_read() -> None:
    """Paid 1, hole, -2, 6."""
    old = torch.tensor([[-2.0, math.nan, -1.0, -5.0]])
    teacher = torch.tensor([[-1.0, math.inf, -3.0, 1.0]])
    mask = torch.tensor([[1, 0, 1, 1]])
    assert reverse_kl_returns(old, teacher, mask, 0.0).tolist() == [[1.0, 0.0, -2.0, 6.0]]
    assert reverse_kl_returns(old, teacher, mask, 1.0).tolist() == [[5.0, 0.0, 4.0, 6.0]]
    assert reverse_kl_returns(old, teacher, mask, 0.5).tolist() == [[1.5, 0.0, 1.0, 6.0]]
    assert reverse_kl_returns(old[:, :0], teacher[:, :0], mask[:, :0], 0.5).shape == (1, 0)


def table(parameters: Tensor, prefix: tuple[int, ...]) -> Tensor:
    """Log-probabilities of the next of three tokens after a prefix of at most one token."""
    return torch.log_softmax(parameters[0 if not prefix else 1 + prefix[0]], -1)


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_expected_policy_gradient_is_minus_the_gradient_of_the_reverse_kl(discount: float) -> None:
    """Every response of two tokens, weighted by its probability.

    Discount 1: of the KL of whole responses.  Discount 0: of the KL of each token, the states held where they are.
    """
    student, teacher = logits(22, 4, 3).requires_grad_(), logits(23, 4, 3)
    rows = list(itertools.product(range(3), repeat=2))
    logp = torch.stack([torch.stack([table(student, r[:t])[r[t]] for t in range(2)]) for r in rows])
    ref = torch.stack([torch.stack([table(teacher, r[:t])[r[t]] for t in range(2)]) for r in rows])
    chance = logp.sum(1).exp().detach()
    paid = reverse_kl_returns(logp.detach(), ref, torch.ones(9, 2), discount)
    (ours,) = torch.autograd.grad((chance[:, None] * paid * logp).sum(), student, retain_graph=True)
    if discount == 1.0:
        exact = (logp.sum(1).exp() * (logp - ref).sum(1)).sum()
    else:
        first = exact_kl(student[:1], teacher[:1]).sum()
        visits = torch.softmax(student[0], -1).detach()
        exact = first + (visits * exact_kl(student[1:], teacher[1:])).sum()
    (theirs,) = torch.autograd.grad(exact, student)
    torch.testing.assert_close(ours, -theirs, rtol=0, atol=1e-12)


def test_the_two_discounts_are_not_aliases() -> None:
    old, teacher = logits(24, 3, 4), logits(25, 3, 4)
    one, other = (reverse_kl_returns(old, teacher, torch.ones(3, 4), discount) for discount in (0.0, 1.0))
    assert float((one - other).abs().max()) > 1e-3


def test_the_baseline_by_hand_leaves_the_own_row_out() -> None:
    paid = torch.tensor([[1.0, 5.0, 2.0], [4.0, math.nan, 9.0], [7.0, 1.0, math.nan]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    expected = [[1 - 5.5, 5 - 1, 2.0], [4 - 4.0, 0.0, 0.0], [7 - 2.5, 1 - 5, 0.0]]
    assert less_others_at_position(paid, mask).tolist() == [pytest.approx(row) for row in expected]


def test_the_baseline_does_not_change_the_expected_gradient() -> None:
    """Every pair of two independent responses of two tokens."""
    student, teacher = logits(26, 4, 3).requires_grad_(), logits(27, 4, 3)
    rows = list(itertools.product(range(3), repeat=2))
    logp = torch.stack([torch.stack([table(student, r[:t])[r[t]] for t in range(2)]) for r in rows])
    ref = torch.stack([torch.stack([table(teacher, r[:t])[r[t]] for t in range(2)]) for r in rows])
    chance = logp.sum(1).exp().detach()
    with_baseline = without = torch.zeros((), dtype=torch.float64)
    for i, j in itertools.product(range(9), repeat=2):
        both = logp[[i, j]]
        paid = reverse_kl_returns(both.detach(), ref[[i, j]], torch.ones(2, 2), 1.0)
        weight = chance[i] * chance[j]
        without = without + weight * (paid * both).sum()
        with_baseline = with_baseline + weight * (less_others_at_position(paid, torch.ones(2, 2)) * both).sum()
    (one,) = torch.autograd.grad(without, student, retain_graph=True)
    (other,) = torch.autograd.grad(with_baseline, student)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
