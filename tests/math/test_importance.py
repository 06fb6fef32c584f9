"""Importance weights against scalar Python, and by enumeration of what they correct."""

from __future__ import annotations

import math

import pytest
import torch

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.importance import (
    CORRECTIONS,
    chi_squared,
    effective_sample_size,
    importance_weights,
    mismatch_of,
)


def reference(old, rollout, mask, kind, cap, floor=0.0):
    """Row by row in plain Python: weights, ratios, capped."""
    weights, ratios, capped = [], [], []
    for o, r, m in zip(old, rollout, mask, strict=True):
        total = sum(a - b for a, b, k in zip(o, r, m, strict=True) if k)
        of_row = {"sequence": math.exp(total), "geometric": math.exp(total / max(1, sum(m)))}.get(kind.split("_")[0])
        row = [math.exp(a - b) if of_row is None else of_row for a, b in zip(o, r, strict=True)]
        ratios.append([x if k else 0.0 for x, k in zip(row, m, strict=True)])
        capped.append([bool(k) and x > cap for x, k in zip(row, m, strict=True)])
        over, under = (cap, floor) if kind.endswith("truncated") else (0.0, 0.0)
        bounded = [over if x > cap else under if x < floor else x for x in row]
        weights.append([x if k else 0.0 for x, k in zip(bounded, m, strict=True)])
    return weights, ratios, capped


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("cap", [1.0, 2.0])
@pytest.mark.parametrize("floor", [None, 0.7])
def test_against_scalars_in_float64_with_holes(kind: str, cap: float, floor: float | None) -> None:
    random = torch.Generator().manual_seed(3)
    old, rollout = (-3 * torch.rand(24, 6, dtype=torch.float64, generator=random) for _ in range(2))
    mask = torch.rand(24, 6, generator=random) < 0.7
    mask[-1] = False
    found = importance_weights(old, rollout, mask, kind, cap, floor=floor)
    weights, ratios, capped = reference(old.tolist(), rollout.tolist(), mask.tolist(), kind, cap, floor or 0.0)
    assert found.weight.tolist() == [pytest.approx(row, rel=1e-12, abs=1e-15) for row in weights]
    assert found.ratio.tolist() == [pytest.approx(row, rel=1e-12, abs=1e-15) for row in ratios]
    assert found.capped.tolist() == capped
    assert any(any(row) for row in capped)
    below = [
        [bool(k) and x < (floor or 0.0) for x, k in zip(*rows, strict=True)]
        for rows in zip(ratios, mask.tolist(), strict=True)
    ]
    assert found.floored.tolist() == below
    assert any(any(row) for row in below) == (floor is not None)
    assert not found.vetoed.any()


def test_by_hand() -> None:
    log = math.log
    old = torch.tensor([[log(0.6), log(0.2), 99.0]])
    rollout = torch.tensor([[log(0.2), log(0.4), -99.0]])
    mask = torch.tensor([[True, True, False]])
    ratio = {kind: importance_weights(old, rollout, mask, kind, 2.0).weight.tolist()[0] for kind in CORRECTIONS}
    assert ratio["token_truncated"] == pytest.approx([2.0, 0.5, 0.0])  # 3 and 0.5
    assert ratio["token_masked"] == pytest.approx([0.0, 0.5, 0.0])
    assert ratio["sequence_truncated"] == pytest.approx([1.5, 1.5, 0.0])  # 3 x 0.5
    assert ratio["sequence_masked"] == pytest.approx([1.5, 1.5, 0.0])
    assert ratio["geometric_truncated"] == pytest.approx([math.sqrt(1.5), math.sqrt(1.5), 0.0])


def test_sequence_weights_turn_the_samplers_expectation_into_the_trainers() -> None:
    sampler, trainer = [[0.5, 0.5], [0.8, 0.2]], [[0.7, 0.3], [0.4, 0.6]]  # by position, two tokens each
    value = [[1.0, -2.0], [3.0, 0.5]]  # of each two-token response
    expected = sum(trainer[0][a] * trainer[1][b] * value[a][b] for a in range(2) for b in range(2))
    rows = [(a, b) for a in range(2) for b in range(2)]
    logs = [torch.tensor([[math.log(p[0][a]), math.log(p[1][b])] for a, b in rows]) for p in (trainer, sampler)]
    weight = importance_weights(*logs, torch.ones(4, 2), "sequence_truncated", 100.0).weight[:, 0].tolist()
    corrected = sum(sampler[0][a] * sampler[1][b] * value[a][b] * w for (a, b), w in zip(rows, weight, strict=True))
    assert corrected == pytest.approx(expected, rel=1e-6)


def test_mismatch_is_an_unbiased_kl_of_sampler_against_trainer_and_never_negative() -> None:
    sampler, trainer = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    logs = [torch.tensor([[math.log(p) for p in ps]], dtype=torch.float64) for ps in (trainer, sampler)]
    kl = importance_weights(*logs, torch.ones(1, 3), "token_truncated", 2.0).mismatch_kl[0]
    exact = sum(p * math.log(p / q) for p, q in zip(sampler, trainer, strict=True))
    assert sum(p * k for p, k in zip(sampler, kl.tolist(), strict=True)) == pytest.approx(exact, abs=1e-12)
    assert (kl >= 0).all()


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_equal_logprobs_weigh_one_nothing_gets_gradient_and_what_is_masked_is_not_read(kind: str) -> None:
    logp = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0]])
    found = importance_weights(logp, logp, mask, kind, 1.0)
    assert found.weight.tolist() == [[1.0, 1.0, 0.0]]
    assert found.mismatch_kl.tolist() == [[0.0, 0.0, 0.0]]
    assert not found.weight.requires_grad
    far = importance_weights(torch.full((1, 4), 0.0), torch.full((1, 4), -900.0), torch.ones(1, 4), kind, 3.0)
    assert far.weight.isfinite().all()


HAND = (
    torch.log(torch.tensor([[0.6, 0.2, 0.5], [0.5, 0.1, 0.9]])),
    torch.log(torch.tensor([[0.2, 0.4, 0.5], [0.5, 0.4, 0.3]])),
    torch.tensor([[True, True, False], [True, True, False]]),
)  # token ratios 3, 0.5 and 1, 0.25; of the rows 1.5 and 0.25


def test_weights_of_mean_one_by_hand() -> None:
    tokens = importance_weights(*HAND, "token_truncated", 2.0, normalize=True).weight
    mean = (2.0 + 0.5 + 1.0 + 0.25) / 4
    assert tokens.tolist() == [
        pytest.approx([2.0 / mean, 0.5 / mean, 0.0]),
        pytest.approx([1 / mean, 0.25 / mean, 0.0]),
    ]
    masked = importance_weights(*HAND, "token_masked", 2.0, normalize=True).weight
    mean = (0.0 + 0.5 + 1.0 + 0.25) / 4
    assert masked[0].tolist() == pytest.approx([0.0, 0.5 / mean, 0.0]), "a masked token counts in the mean"
    mask = HAND[2].clone()
    mask[1, 1] = False  # rows of 2 and 1 tokens: each row counts once
    rows = importance_weights(*HAND[:2], mask, "sequence_truncated", 2.0, normalize=True).weight
    assert rows.tolist() == [pytest.approx([1.2, 1.2, 0.0]), pytest.approx([0.8, 0.0, 0.0])]
    nothing = importance_weights(*HAND, "token_masked", 1.0, floor=1.0, normalize=True).weight
    assert nothing.tolist() == [[0.0, 0.0, 0.0], [4.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", ["none", *CORRECTIONS])
def test_a_response_with_an_extreme_token_is_vetoed_whatever_the_level(kind: str) -> None:
    free = importance_weights(*HAND, kind, 2.0)
    found = importance_weights(*HAND, kind, 2.0, veto=0.3)
    assert found.vetoed.tolist() == [[False] * 3, [True, True, False]]
    assert found.weight[1].tolist() == [0.0] * 3
    assert torch.equal(found.weight[0], free.weight[0])
    assert not importance_weights(*HAND, kind, 2.0, veto=0.2).vetoed.any()
    hidden = HAND[2].clone()
    hidden[1, 1] = False
    assert not importance_weights(*HAND[:2], hidden, kind, 2.0, veto=0.3).vetoed.any(), "not of the policy's tokens"


def test_without_a_correction_every_token_weighs_one() -> None:
    assert importance_weights(*HAND, "none", 2.0).weight.tolist() == [[1.0, 1.0, 0.0]] * 2


def test_the_measures_of_the_mismatch_by_hand() -> None:
    poisoned = [x.masked_fill(~HAND[2], math.nan) for x in HAND[:2]]
    found = mismatch_of(*poisoned, HAND[2])
    logs = [[math.log(3), math.log(0.5)], [0.0, math.log(0.25)]]
    assert found.ratio.tolist() == [pytest.approx([3.0, 0.5, 0.0]), pytest.approx([1.0, 0.25, 0.0])]
    assert found.kl_k1.tolist() == [pytest.approx([-x for x in row] + [0.0], abs=1e-6) for row in logs]
    assert found.kl_k3.tolist() == [pytest.approx([math.exp(x) - 1 - x for x in row] + [0.0], abs=1e-6) for row in logs]
    assert found.log_ratio.tolist() == pytest.approx([math.log(1.5), math.log(0.25)])
    assert found.perplexity_ratio.tolist() == pytest.approx([1 / math.sqrt(1.5), 2.0])
    assert found.filled.tolist() == [True, True]
    ratios = torch.tensor([3.0, 0.5, 1.0, 0.25])
    assert chi_squared(ratios) == pytest.approx((9 + 0.25 + 1 + 0.0625) / 4 - 1)
    assert effective_sample_size(ratios) == pytest.approx(4.75**2 / (4 * 10.3125))
    assert effective_sample_size(torch.tensor([2.0, 2.0])) == 1.0
    assert effective_sample_size(torch.zeros(3)) == 0.0
    empty = mismatch_of(*HAND[:2], torch.zeros_like(HAND[2]))
    assert not empty.filled.any()


def test_k1_and_chi_squared_are_unbiased_over_the_samplers_draws() -> None:
    sampler, trainer = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    logs = [torch.tensor([[math.log(p) for p in ps]], dtype=torch.float64) for ps in (trainer, sampler)]
    found = mismatch_of(*logs, torch.ones(1, 3))
    exact = sum(p * math.log(p / q) for p, q in zip(sampler, trainer, strict=True))
    assert sum(p * k for p, k in zip(sampler, found.kl_k1[0].tolist(), strict=True)) == pytest.approx(exact, abs=1e-12)
    chi = sum((q - p) ** 2 / p for p, q in zip(sampler, trainer, strict=True))
    draws = torch.repeat_interleave(found.ratio[0], torch.tensor([5, 3, 2]))  # as often as they are drawn
    assert chi_squared(draws) == pytest.approx(chi, abs=1e-9)


def test_bad_arguments_are_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"'token_truncate' .*Did you mean token_truncated"):
        importance_weights(x, x, x, "token_truncate", 2.0)
    for floor in (0.0, 1.5, math.nan):
        with pytest.raises(ConfigError, match="floor"):
            importance_weights(x, x, x, "token_masked", 2.0, floor=floor)
    for veto in (0.0, 1.0, math.nan):
        with pytest.raises(ConfigError, match="veto"):
            importance_weights(x, x, x, "token_masked", 2.0, veto=veto)
    for cap in (0.5, math.nan):
        with pytest.raises(ConfigError, match="cap"):
            importance_weights(x, x, x, "token_masked", cap)
    with pytest.raises(ShapeError):
        importance_weights(x, torch.zeros(2, 4), x, "token_masked", 2.0)
