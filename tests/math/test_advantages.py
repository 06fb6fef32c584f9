"""GAE against the double sum of its definition over the real tokens; whitening against the statistics module."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.advantages import gae, whiten

NAN = float("nan")


def gae_double_sum(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lam: float, last: list[float]) -> Tensor:
    """A_t = sum_l (gamma lam)^l delta_{t+l} over the tokens that count, written as sums, row by row."""
    advantage = torch.zeros(reward.shape, dtype=torch.float64)
    for b in range(len(reward)):
        real = [t for t in range(reward.shape[1]) if mask[b, t]]
        rewards = [reward[b, t].item() for t in real]
        values = [value[b, t].item() for t in real] + [last[b]]
        delta = [rewards[i] + gamma * values[i + 1] - values[i] for i in range(len(real))]
        for i, t in enumerate(real):
            advantage[b, t] = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(real)))
    return advantage


def random_case(seed: int, rows: int = 4, tokens: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    reward, value = (torch.randn(rows, tokens, dtype=torch.float64, generator=random) for _ in range(2))
    mask = torch.rand(rows, tokens, generator=random) < 0.6
    return reward, value, mask, torch.randn(rows, dtype=torch.float64, generator=random)


@given(
    seed=st.integers(0, 10_000),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    cut=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_gae_matches_the_double_sum_in_float64(seed: int, gamma: float, lam: float, cut: bool) -> None:
    reward, value, mask, bootstrap = random_case(seed)
    advantage, ret = gae(reward, value, mask, gamma, lam, bootstrap if cut else None)
    expected = gae_double_sum(reward, value, mask, gamma, lam, bootstrap.tolist() if cut else [0.0] * 4)
    torch.testing.assert_close(advantage, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ret, torch.where(mask, expected + value, 0.0), rtol=0, atol=1e-12)


def test_gae_hand_computed_three_tokens() -> None:
    # gamma 1, lam 1/2, r = 0 0 1, V = 1 2 4:  delta = 2-1, 4-2, 1-4 = 1, 2, -3
    # A_2 = -3, A_1 = 2 - 1.5 = 0.5, A_0 = 1 + 0.25 = 1.25; returns A + V = 2.25, 2.5, 1
    advantage, ret = gae(torch.tensor([[0.0, 0, 1]]), torch.tensor([[1.0, 2, 4]]), torch.ones(1, 3), 1.0, 0.5)
    assert advantage.tolist() == [[1.25, 0.5, -3.0]]
    assert ret.tolist() == [[2.25, 2.5, 1.0]]


def test_gae_hole_and_padding_by_hand() -> None:
    # the same three tokens with a tool token before the third and padding after it
    advantage, ret = gae(
        torch.tensor([[0.0, 0, 9, 1, 9]]),
        torch.tensor([[1.0, 2, 9, 4, 9]]),
        torch.tensor([[1, 1, 0, 1, 0]]),
        1.0,
        0.5,
    )
    assert advantage.tolist() == [[1.25, 0.5, 0.0, -3.0, 0.0]]
    assert ret.tolist() == [[2.25, 2.5, 0.0, 1.0, 0.0]]


def test_a_hole_takes_no_discount() -> None:
    reward, value = torch.tensor([[0.0, 5, 1]]), torch.zeros(1, 3)
    advantage, _ = gae(reward, value, torch.tensor([[1, 0, 1]]), 0.5, 1.0)
    assert advantage.tolist() == [[0.5, 0.0, 1.0]]  # one step of the policy away, not two


def test_bootstrap_by_hand_goes_after_the_last_real_token() -> None:
    # gamma 1/2: delta of the last = 1 + 0.5 * 8 - 4 = 1, through the padding
    advantage, _ = gae(
        torch.tensor([[1.0, 0.0]]), torch.tensor([[4.0, 7.0]]), torch.tensor([[1, 0]]), 0.5, 0.9, torch.tensor([8.0])
    )
    assert advantage.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("junk", [1e9, NAN, float("inf")])
def test_gae_ignores_values_under_the_mask(junk: float) -> None:
    reward, value, mask, bootstrap = random_case(5)
    before = gae(reward, value, mask, 0.99, 0.95, bootstrap)
    after = gae(reward.masked_fill(~mask, junk), value.masked_fill(~mask, junk), mask, 0.99, 0.95, bootstrap)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_gae_does_not_depend_on_padding() -> None:
    reward, value, mask, bootstrap = random_case(6)
    pad = torch.ones(4, 3, dtype=torch.float64)
    longer = gae(
        torch.cat([reward, pad], 1), torch.cat([value, pad], 1), torch.cat([mask, pad * 0 > 0], 1), 0.9, 0.8, bootstrap
    )
    assert torch.equal(longer[0][:, :7], gae(reward, value, mask, 0.9, 0.8, bootstrap)[0])
    assert not longer[0][:, 7:].any()


def test_gae_lambda_one_is_return_minus_value() -> None:
    reward, value, _, _ = random_case(7)
    advantage, ret = gae(reward, value, torch.ones(4, 7), 1.0, 1.0)
    reward_to_go = torch.stack([reward[:, t:].sum(1) for t in range(7)], 1)
    torch.testing.assert_close(advantage, reward_to_go - value, rtol=0, atol=1e-12)
    torch.testing.assert_close(ret, reward_to_go, rtol=0, atol=1e-12)


def test_gae_lambda_zero_is_the_one_step_error() -> None:
    reward, value, _, _ = random_case(8)
    advantage, _ = gae(reward, value, torch.ones(4, 7), 0.9, 0.0)
    after = torch.cat([value[:, 1:], torch.zeros(4, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(advantage, reward + 0.9 * after - value, rtol=0, atol=1e-12)


def test_gae_gradcheck_and_degenerate_shapes() -> None:
    reward, value, mask, bootstrap = random_case(9, rows=2, tokens=4)
    inputs = [x.requires_grad_(True) for x in (reward, value, bootstrap)]
    assert torch.autograd.gradcheck(lambda r, v, b: gae(r, v, mask, 0.9, 0.8, b), inputs)
    empty = gae(torch.zeros(3, 0), torch.zeros(3, 0), torch.zeros(3, 0), 1.0, 1.0)
    assert empty[0].shape == empty[1].shape == (3, 0)
    assert (
        gae(torch.ones(1, 2).bfloat16(), torch.ones(1, 2).bfloat16(), torch.ones(1, 2), 1, 1)[0].dtype == torch.float32
    )


def test_gae_refuses_bad_input() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"value \(2, 1\)"):
        gae(x, x[:, :1], x, 1.0, 1.0)
    with pytest.raises(ShapeError, match="one value per sequence"):
        gae(x, x, x, 1.0, 1.0, torch.zeros(3))
    with pytest.raises(ShapeError):
        gae(x[0], x[0], x[0], 1.0, 1.0)
    for gamma, lam in ((1.1, 1.0), (1.0, -0.1), (NAN, 1.0)):
        with pytest.raises(ConfigError, match=r"\[0, 1\]"):
            gae(x, x, x, gamma, lam)


# --- whitening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_is_standardisation_with_the_sample_variance(shift_mean: bool) -> None:
    x, _, mask, _ = random_case(1)
    x = 3 * x + 5
    values = x[mask].tolist()
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    white = whiten(x, mask, shift_mean)
    expected = torch.where(mask, (x - mean) / deviation + (0 if shift_mean else mean), 0.0)
    torch.testing.assert_close(white, expected, rtol=0, atol=1e-7)  # eps is 1e-8 of a variance of about 9
    kept = white[mask].tolist()
    assert statistics.stdev(kept) == pytest.approx(1.0, abs=1e-7)
    assert statistics.mean(kept) == pytest.approx(0.0 if shift_mean else mean, abs=1e-9)


def test_whiten_by_hand() -> None:
    # mean 2, sample variance ((1 + 1) / 1) = 2
    white = whiten(torch.tensor([[1.0, 99.0], [NAN, 3.0]]), torch.tensor([[1, 0], [0, 1]]))
    torch.testing.assert_close(white, torch.tensor([[-(0.5**0.5), 0], [0, 0.5**0.5]]))
    kept = whiten(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2), shift_mean=False)
    torch.testing.assert_close(kept, torch.tensor([[2 - 0.5**0.5, 2 + 0.5**0.5]]))


def test_whiten_ignores_values_under_the_mask() -> None:
    x, _, mask, _ = random_case(2)
    for junk in (1e9, NAN):
        assert torch.equal(whiten(x, mask), whiten(x.masked_fill(~mask, junk), mask))
        assert torch.equal(whiten(x, mask, False), whiten(x.masked_fill(~mask, junk), mask, False))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_whitening_one_or_equal_tokens_gives_no_nan(tokens: int) -> None:
    mask = torch.arange(6).unsqueeze(0) < tokens
    x = torch.full((1, 6), 0.5)
    assert whiten(x, mask).tolist() == [[0.0] * 6]
    assert whiten(x, mask, shift_mean=False).tolist() == [[0.5] * tokens + [0.0] * (6 - tokens)]


def test_whiten_gradcheck() -> None:
    x, _, mask, _ = random_case(3)
    assert torch.autograd.gradcheck(lambda v: whiten(v, mask), x.requires_grad_(True))
