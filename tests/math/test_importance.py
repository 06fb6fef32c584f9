"""Importance weights against scalar Python, and by enumeration of what they correct."""

from __future__ import annotations

import math

import pytest
import torch

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.importance import CORRECTIONS, importance_weights


def reference(old, rollout, mask, kind, cap):
    """Row by row in plain Python: weights, ratios, capped."""
    weights, ratios, capped = [], [], []
    for o, r, m in zip(old, rollout, mask, strict=True):
        total = math.exp(sum(a - b for a, b, k in zip(o, r, m, strict=True) if k))
        row = [(total if kind.startswith("sequence") else math.exp(a - b)) for a, b in zip(o, r, strict=True)]
        ratios.append([x if k else 0.0 for x, k in zip(row, m, strict=True)])
        capped.append([bool(k) and x > cap for x, k in zip(row, m, strict=True)])
        over = cap if kind.endswith("truncated") else 0.0
        weights.append([(over if x > cap else x) if k else 0.0 for x, k in zip(row, m, strict=True)])
    return weights, ratios, capped


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_against_scalars_in_float64_with_holes(kind: str, cap: float) -> None:
    random = torch.Generator().manual_seed(3)
    old, rollout = (-2 * torch.rand(16, 6, dtype=torch.float64, generator=random) for _ in range(2))
    mask = torch.rand(16, 6, generator=random) < 0.7
    found = importance_weights(old, rollout, mask, kind, cap)
    weights, ratios, capped = reference(old.tolist(), rollout.tolist(), mask.tolist(), kind, cap)
    assert found.weight.tolist() == [pytest.approx(row, rel=1e-12, abs=1e-15) for row in weights]
    assert found.ratio.tolist() == [pytest.approx(row, rel=1e-12, abs=1e-15) for row in ratios]
    assert found.capped.tolist() == capped
    assert any(any(row) for row in capped)


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


def test_bad_arguments_are_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"'token_truncate' .*Did you mean token_truncated"):
        importance_weights(x, x, x, "token_truncate", 2.0)
    for cap in (0.5, math.nan):
        with pytest.raises(ConfigError, match="cap"):
            importance_weights(x, x, x, "token_masked", cap)
    with pytest.raises(ShapeError):
        importance_weights(x, torch.zeros(2, 4), x, "token_masked", 2.0)
