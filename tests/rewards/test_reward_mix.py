"""The weighted mix of reward sources, and responses without a score."""

from __future__ import annotations

import math

import pytest
import torch
from rewards_kit import text_rollout

from tutelage.errors import RewardError
from tutelage.rewards.mix import RewardMix
from tutelage.roles.reward import Reward
from tutelage.types import Scores


class Fixed:
    def __init__(self, name, values):
        self.name = name
        self.values = values

    def score(self, rollout):
        return torch.tensor(self.values)


class Trying(Fixed):
    """NaN has the reason "odd"."""

    def attempt(self, rollout):
        return torch.tensor(self.values), tuple("odd" if math.isnan(v) else "" for v in self.values)


def test_total_is_the_weighted_sum_of_named_scores():
    mix = RewardMix([Fixed("a", [1.0, 2.0]), Fixed("b", [10.0, -4.0])], [0.5, -0.25])
    scores = mix.score(text_rollout("x", "y"))
    assert scores.values.tolist() == [[1.0, 10.0], [2.0, -4.0]]
    assert scores.total.tolist() == [0.5 - 2.5, 1.0 + 1.0]
    assert (scores.names, scores.weights, scores.errors) == (("a", "b"), (0.5, -0.25), None)
    assert scores.values.dtype == scores.total.dtype == torch.float32
    assert scores.valid.tolist() == [True, True]


def test_sources_of_one_name_are_told_apart():
    assert RewardMix([Fixed(n, []) for n in ("a", "b", "a", "a")], [1, 1, 1, 1]).names == ("a", "b", "a_2", "a_3")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_named_by_source_and_row(bad):
    mix = RewardMix([Fixed("fine", [0.0, 0.0, 0.0]), Fixed("odd", [0.0, bad, bad])], [1.0, 0.0])
    said = rf"odd returned {bad} for row 1 \(prompt 'id1', sample 0, response 'y'\), and 1 more row"
    with pytest.raises(RewardError, match=said):
        mix.score(text_rollout("x", "y", "z"))


def test_skip_leaves_the_rows_of_a_rule_out_and_keeps_the_reasons():
    nan = math.nan
    sources = [Trying("a", [1.0, nan, 3.0, nan]), Fixed("m", [0.0, 0.5, 1.0, 0.0]), Trying("b", [nan, 2.0, 2.0, nan])]
    scores = RewardMix(sources, [1.0, 2.0, 0.0], "skip").score(text_rollout(*"wxyz"))
    assert scores.errors == ("odd", "odd", "", "odd")
    assert scores.valid.tolist() == [False, False, True, False]
    assert scores.total[2] == 3.0 + 2.0
    assert scores.total[[0, 1, 3]].isnan().all()


def test_skip_has_reasons_for_all_rows_also_where_nothing_failed():
    # Parts of a batch are concatenated: one with reasons and one without must fit together.
    mix = RewardMix([Trying("a", [1.0, 2.0])], [1.0], "skip")
    whole = Scores.concat([mix.score(text_rollout("x", "y")), mix.score(text_rollout("x", "y"))])
    assert whole.errors == ("",) * 4


def test_a_reward_model_that_returns_nan_has_broken_weights_and_stops_the_run():
    with pytest.raises(RewardError, match="m returned nan for row 0"):
        RewardMix([Fixed("m", [math.nan])], [1.0], "skip").score(text_rollout("x"))


def test_a_value_too_large_for_float32_is_no_score():
    with pytest.raises(RewardError, match="a returned inf"):
        RewardMix([Trying("a", [math.inf])], [1.0], "skip").score(text_rollout("x"))


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


def test_the_role_remembers_what_it_could_not_score_until_it_is_asked():
    role = Reward(RewardMix([Trying("a", [math.nan, 1.0])], [1.0], "skip"))
    role.score(text_rollout("x", "y", truths=["t", "u"]))
    (record,) = role.take_errors()
    assert record == {
        "id": "id0",
        "sample": 0,
        "messages": [{"role": "user", "content": "question 0"}],
        "response": "x",
        "truth": "t",
        "error": "odd",
    }
    assert role.take_errors() == []
