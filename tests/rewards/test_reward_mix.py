"""The weighted mix of reward sources."""

from __future__ import annotations

import math

import pytest
import torch
from rewards_kit import text_rollout

from tutelage.errors import RewardError
from tutelage.rewards.mix import RewardMix


class Fixed:
    def __init__(self, name, values):
        self.name = name
        self.values = values

    def score(self, rollout):
        return torch.tensor(self.values)


def test_total_is_the_weighted_sum_of_named_scores():
    mix = RewardMix([Fixed("a", [1.0, 2.0]), Fixed("b", [10.0, -4.0])], [0.5, -0.25])
    score_BK, total_B, names = mix.score(text_rollout("x", "y"))
    assert score_BK.tolist() == [[1.0, 10.0], [2.0, -4.0]]
    assert total_B.tolist() == [0.5 - 2.5, 1.0 + 1.0]
    assert names == ("a", "b")
    assert score_BK.dtype == total_B.dtype == torch.float32


def test_sources_of_one_name_are_told_apart():
    assert RewardMix([Fixed(n, []) for n in ("a", "b", "a", "a")], [1, 1, 1, 1]).names == ("a", "b", "a_2", "a_3")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_named_by_source_and_row(bad):
    mix = RewardMix([Fixed("fine", [0.0, 0.0, 0.0]), Fixed("odd", [0.0, bad, bad])], [1.0, 0.0])
    said = rf"odd returned {bad} for row 1 \(prompt 'id1', sample 0, response 'y'\), and 1 more row"
    with pytest.raises(RewardError, match=said):
        mix.score(text_rollout("x", "y", "z"))


def test_a_wrong_count_is_named():
    with pytest.raises(RewardError, match=r"odd returned scores of shape \(2,\) for 3 responses"):
        RewardMix([Fixed("odd", [0.0, 0.0])], [1.0]).score(text_rollout("x", "y", "z"))


def test_bad_set_ups_are_refused():
    with pytest.raises(RewardError, match="no reward source"):
        RewardMix([], [])
    with pytest.raises(RewardError, match="2 weights for 1"):
        RewardMix([Fixed("a", [])], [1.0, 2.0])
    with pytest.raises(RewardError, match="weight of a is nan"):
        RewardMix([Fixed("a", [])], [math.nan])
