"""Pairing, XPO and Nash-MD against loops in plain Python, numbers worked out by hand, and finite differences."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.online_preference import (
    best_and_worst,
    mixed_logits,
    nash_md_loss,
    preference_of,
    sigmoid_preference,
    win_preference,
    xpo_loss,
)
from tutelage.math.preference import PREFERENCE_LOSSES, PreferenceInputs, PreferenceSettings

# ---- pairing ----


def test_of_two_the_higher_is_preferred_whichever_comes_first() -> None:
    found = best_and_worst(torch.tensor([1.0, 3.0, 5.0, 2.0]), torch.tensor([0, 0, 1, 1]))
    assert found.best.tolist() == [1, 2]
    assert found.worst.tolist() == [0, 3]
    assert found.margin.tolist() == [2.0, 3.0]
    assert found.unscored.tolist() == [False, False]


def test_of_many_the_best_meets_the_worst_and_groups_may_lie_mixed() -> None:
    generator = random.Random(0)
    groups = [0] * 5 + [1] * 2 + [2] * 4
    scores = [generator.choice([-2.0, -1.0, 0.0, 1.0, 2.5]) + i / 1024 for i in range(11)]
    order = list(range(11))
    generator.shuffle(order)
    found = best_and_worst(torch.tensor([scores[i] for i in order]), torch.tensor([groups[i] for i in order]))
    for place, group in enumerate([0, 1, 2]):
        rows = [row for row, i in enumerate(order) if groups[i] == group]
        best = max(rows, key=lambda row: scores[order[row]])
        worst = min(rows, key=lambda row: scores[order[row]])
        assert (int(found.best[place]), int(found.worst[place])) == (best, worst)
        assert float(found.margin[place]) == pytest.approx(scores[order[best]] - scores[order[worst]], abs=1e-6)


def test_a_tie_has_margin_zero_and_still_two_rows() -> None:
    found = best_and_worst(torch.tensor([4.0, 4.0, 4.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1]))
    assert found.margin.tolist() == [0.0, 0.0]
    assert found.best.tolist() == [0, 3]
    assert found.worst.tolist() == [2, 4]


def test_a_response_without_a_score_is_neither_best_nor_worst_and_its_score_is_not_read() -> None:
    score = torch.tensor([math.nan, 1.0, 2.0, math.inf, 7.0, 7.0, math.nan, math.nan])
    valid = torch.tensor([False, True, True, False, True, True, False, False])
    found = best_and_worst(score, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]), valid)
    assert (found.best.tolist()[0], found.worst.tolist()[0]) == (2, 1)
    assert found.margin.tolist() == [1.0, 0.0, 0.0]
    assert found.unscored.tolist() == [False, False, True]


def test_with_one_score_left_there_is_no_preference() -> None:
    valid = torch.tensor([True, False])
    found = best_and_worst(torch.tensor([3.0, math.nan]), torch.tensor([0, 0]), valid)
    assert found.unscored.tolist() == [True]
    assert found.margin.tolist() == [0.0]
    assert sorted([int(found.best), int(found.worst)]) == [0, 1]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ShapeError, match="group 4 has one response"):
        best_and_worst(torch.zeros(3), torch.tensor([2, 4, 2]))
    with pytest.raises(ShapeError, match="no response"):
        best_and_worst(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ShapeError, match="shapes differ"):
        best_and_worst(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


# ---- XPO ----


def test_xpo_by_hand() -> None:
    """beta 0.5: z = 0.5 (1 - (-1)) = 1, -log sigmoid(1) = 0.31326; alpha 0.1 of a logprob of -4 takes away 0.4."""
    preference = torch.tensor([0.3132616875, 9.0], dtype=torch.float64)
    found = xpo_loss(preference, torch.tensor([-4.0, -2.0], dtype=torch.float64), torch.tensor([True, False]), 0.1)
    assert found.tolist() == pytest.approx([0.3132616875 - 0.4, -0.2])


def xpo_reference(own: list[float], rival: list[float], wins: bool, beta: float, alpha: float) -> float:
    """Algorithm 1 for one pair: [log pi, log ref] of the policy's response and of the reference's."""
    better, worse = (own, rival) if wins else (rival, own)
    z = beta * (better[0] - better[1]) - beta * (worse[0] - worse[1])
    return -math.log(1 / (1 + math.exp(-z))) + alpha * rival[0]


@pytest.mark.parametrize("wins", [True, False])
def test_xpo_against_the_algorithm_of_the_paper(wins: bool) -> None:
    own, rival, beta, alpha = [-3.0, -4.5], [-2.5, -2.0], 0.4, 0.05
    better, worse = (own, rival) if wins else (rival, own)
    columns = [torch.tensor([side[k]], dtype=torch.float64) for side, k in itertools.product((better, worse), (0, 1))]
    x = PreferenceInputs.of(columns[0], columns[2], columns[1], columns[3])
    preference = PREFERENCE_LOSSES["sigmoid"](x, PreferenceSettings(beta=beta)).loss
    found = xpo_loss(preference, torch.tensor([rival[0]], dtype=torch.float64), torch.tensor([True]), alpha)
    assert float(found) == pytest.approx(xpo_reference(own, rival, wins, beta, alpha), abs=1e-12)


def test_xpo_pushes_the_policy_away_from_the_references_response() -> None:
    logp = torch.tensor([-2.0, -3.0], dtype=torch.float64, requires_grad=True)
    xpo_loss(torch.zeros(2, dtype=torch.float64), logp, torch.tensor([True, False]), 0.25).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [0.25, 0.25], "descending lowers its logprob, in ties too"


def test_xpo_gradients() -> None:
    preference = torch.rand(4, dtype=torch.float64, requires_grad=True)
    logp = (-3 * torch.rand(4, dtype=torch.float64)).requires_grad_(True)
    counted = torch.tensor([True, False, True, True])
    assert torch.autograd.gradcheck(lambda a, b: xpo_loss(a, b, counted, 0.3), (preference, logp))


def test_a_tie_of_xpo_may_hold_anything() -> None:
    preference = torch.tensor([math.nan, 1.0], requires_grad=True)
    loss = xpo_loss(preference, torch.zeros(2), torch.tensor([False, True]), 0.1)
    assert loss.tolist() == [0.0, 1.0]


# ---- Nash-MD ----


def test_preferences_by_hand() -> None:
    score, rival = torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 0.0, 1.0])
    wanted = [1 / (1 + math.exp(-2)), 0.5, 1 / (1 + math.exp(2))]
    assert sigmoid_preference(score, rival).tolist() == pytest.approx(wanted)
    assert win_preference(score, rival).tolist() == [1.0, 0.5, 0.0]
    assert sigmoid_preference(score, rival).tolist() == pytest.approx((1 - sigmoid_preference(rival, score)).tolist())
    with pytest.raises(ConfigError, match=r"'sigmod' is not a preference model[\s\S]*sigmoid"):
        preference_of("sigmod")


def test_nash_md_by_hand() -> None:
    """P = 0.8, tau = 0.5, log ratio 0.2: the weight is 0.3 - 0.1 = 0.2, on a logprob of -3 the loss is 0.6."""
    one = torch.ones(1, dtype=torch.float64)
    assert float(nash_md_loss(-3 * one, 0.3 * one, 0.2 * one, 0.5)) == pytest.approx(0.6)


def test_nash_md_has_the_gradient_of_the_papers_objective_in_expectation() -> None:
    """On three answers, summed exactly: d/dtheta of  sum_y pi(y) P(y > pi') - tau KL(pi, mu), pi' fixed."""
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_(True)
    mu = torch.log_softmax(torch.randn(3, generator=generator, dtype=torch.float64), 0)
    prefer = torch.rand(3, 3, generator=generator, dtype=torch.float64)  # P(y > y')
    tau, coef = 0.7, 0.25
    logp = torch.log_softmax(theta, 0)
    mixture = torch.softmax((1 - coef) * logp + coef * mu, 0).detach()
    objective = (logp.exp() * (prefer @ mixture)).sum() - tau * (logp.exp() * (logp - mu)).sum()
    (wanted,) = torch.autograd.grad(objective, theta, retain_graph=True)
    found = torch.zeros(3, dtype=torch.float64)
    for y, rival in itertools.product(range(3), range(3)):
        chance = float(logp.exp()[y].detach() * mixture[rival])
        loss = nash_md_loss(logp[y], prefer[y, rival] - 0.5, logp[y] - mu[y], tau)
        (gradient,) = torch.autograd.grad(loss, theta, retain_graph=True)
        found -= chance * gradient
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_nash_md_pays_for_the_kl_of_later_tokens_only_with_the_ratio_of_the_whole_response() -> None:
    """Two tokens of two letters: d KL / d theta of the first token's logits, by sums over all four answers."""
    generator = torch.Generator().manual_seed(2)
    first = torch.randn(2, generator=generator, dtype=torch.float64).requires_grad_(True)
    second = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    drawn = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (first, second))
    mu_first, mu_second = (torch.log_softmax(x, -1) for x in drawn)
    logp_first, logp_second = torch.log_softmax(first, -1), torch.log_softmax(second, -1)
    kl = sum(
        (logp_first[a] + logp_second[a, b]).exp() * (logp_first[a] + logp_second[a, b] - mu_first[a] - mu_second[a, b])
        for a, b in itertools.product(range(2), range(2))
    )
    (wanted,) = torch.autograd.grad(kl, first, retain_graph=True)
    found = {"sequence": torch.zeros(2, dtype=torch.float64), "token": torch.zeros(2, dtype=torch.float64)}
    zero = torch.zeros((), dtype=torch.float64)
    for a, b in itertools.product(range(2), range(2)):
        chance = float((logp_first[a] + logp_second[a, b]).exp().detach())
        own = logp_first[a] - mu_first[a]
        for kind, ratio in (("sequence", own + logp_second[a, b] - mu_second[a, b]), ("token", own)):
            loss = nash_md_loss(logp_first[a], zero, ratio, 1.0)
            found[kind] += chance * torch.autograd.grad(loss, first, retain_graph=True)[0]
    torch.testing.assert_close(found["sequence"], wanted, rtol=1e-10, atol=1e-12)
    assert float((found["token"] - wanted).abs().max()) > 1e-3


def test_nash_md_gradients_and_no_gradient_into_weights() -> None:
    logp = (-2 * torch.rand(5, dtype=torch.float64)).requires_grad_(True)
    advantage = (torch.rand(5, dtype=torch.float64) - 0.5).requires_grad_(True)
    ratio = torch.randn(5, dtype=torch.float64).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: nash_md_loss(x, advantage, ratio, 0.3), (logp,))
    nash_md_loss(logp, advantage, ratio, 0.3).sum().backward()
    assert advantage.grad is None
    assert ratio.grad is None


# ---- the mixture ----


def test_the_mixture_is_the_normalised_geometric_mean_of_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    own, ref = (torch.randn(2, 5, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    for coef, temperature in itertools.product((0.0, 0.3, 1.0), (1.0, 0.7)):
        found = torch.softmax(mixed_logits(own, ref, coef) / temperature, -1)
        for row in range(2):
            p, q = (torch.softmax(x[row] / temperature, -1).tolist() for x in (own, ref))
            weight = [a ** (1 - coef) * b**coef for a, b in zip(p, q, strict=True)]
            assert found[row].tolist() == pytest.approx([w / sum(weight) for w in weight], abs=1e-12)


def test_at_its_ends_the_mixture_does_not_read_the_other_side() -> None:
    own, ref = torch.tensor([1.0, -math.inf]), torch.tensor([math.nan, 2.0])
    assert mixed_logits(own, ref, 0.0).tolist() == [1.0, -math.inf]
    assert mixed_logits(ref, own, 1.0).tolist() == [1.0, -math.inf]
    half = torch.ones(2, dtype=torch.bfloat16)
    assert mixed_logits(half, half, 0.5).dtype == torch.float32


def test_numbers_out_of_range_are_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ConfigError, match=r"mixture coefficient is 1.5"):
        mixed_logits(one, one, 1.5)
    with pytest.raises(ConfigError, match="alpha of XPO is -1"):
        xpo_loss(one, one, one.bool(), -1.0)
    with pytest.raises(ConfigError, match="beta of Nash-MD is -1"):
        nash_md_loss(one, one, one, -1.0)
    for function in (sigmoid_preference, win_preference):
        with pytest.raises(ShapeError, match="shapes differ"):
            function(one, torch.ones(2))
