"""Each alarm rings on its own condition, once, and says what to change."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tutelage.alarms import Alarms
from tutelage.config import DistillConfig, GRPOConfig, NashMDConfig, OnlineDPOConfig, PPOConfig, RAFTConfig, XPOConfig
from tutelage.evals.online_alarms import PreferenceAlarms
from tutelage.evals.sample_alarms import SampleAlarms

CALM = {
    "kl/sequence": 1.0,
    "policy/clip_fraction": 0.1,
    "policy/entropy": 2.0,
    "rollout/length_mean": 20.0,
    "value/error": 1.0,
}


def alarms(**kl):
    return Alarms(PPOConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "kl": kl}))


@pytest.mark.parametrize(
    ("change", "kind", "advice"),
    [
        ({"kl/sequence": 10.1}, "kl", "kl.coef"),
        ({"policy/clip_fraction": 0.21}, "clip_fraction", "optim.lr"),
        ({"policy/entropy": 0.19}, "entropy_collapse", "entropy_coef"),
        ({"rollout/length_mean": 41.0}, "length_explosion", "missing_eos_penalty"),
        ({"value/error": 10.5}, "value_loss", "critic.lr"),
    ],
)
def test_an_alarm_rings_once_while_its_condition_holds(change, kind, advice):
    watch = alarms()
    for _ in range(3):
        assert watch.check(CALM) == []
    (rung,) = watch.check({**CALM, **change})
    assert rung.kind == kind
    assert advice in rung.message
    assert not rung.stop
    assert watch.check({**CALM, **change}) == []
    assert watch.check(CALM) == []
    assert [a.kind for a in watch.check({**CALM, **change})] == [kind]


@pytest.mark.parametrize(("action", "stops"), [("warn", False), ("lower", False), ("stop", True)])
def test_the_budget_warns_lowers_or_stops(action, stops):
    (rung,) = alarms(budget=0.5, on_budget=action).check(CALM)
    assert rung.kind == "kl_budget"
    assert rung.stop is stops


def test_state_survives_a_checkpoint():
    watch, again = alarms(), alarms()
    watch.check(CALM)
    again.load_state(watch.state())
    (rung,) = again.check({**CALM, "rollout/length_mean": 41.0})
    assert "2.0 times its start (20)" in rung.message or "2.1 times its start (20)" in rung.message


# ---- a step that learns nothing

COMMON = {"model": {"path": "m"}, "data": {"train": "d"}}
SAMPLE_CALM = {"rollout/length_mean": 20.0, "kl/sequence": 1.0, "raft/kept_fraction": 0.25, "raft/score_all": 0.5}
PAIRS_CALM = {
    "rollout/length_mean": 20.0,
    "kl/sequence": 1.0,
    "preference/tied_fraction": 0.1,
    "preference/unscored": 0.0,
}
DISTILL_CALM = {"rollout/length_mean": 20.0, "teacher/kl_token": 0.2, "policy/clip_fraction": 0.1}
UNSCORED = {"reward/errors": 8.0, "reward/score_mean": math.nan}
SOME_UNSCORED = {"reward/errors": 7.0, "reward/score_mean": 0.5}


def watching(algorithm: str, **sections: Any) -> tuple[Any, dict[str, float]]:
    """The alarms of a run, and metrics at which none of them rings."""
    if algorithm == "distill":
        cfg = DistillConfig.model_validate({**COMMON, "teacher": {"path": "t"}, **sections})
        return SampleAlarms(cfg), DISTILL_CALM
    if algorithm == "raft":
        return SampleAlarms(RAFTConfig.model_validate({**COMMON, **sections})), SAMPLE_CALM
    pairs = {"online_dpo": OnlineDPOConfig, "xpo": XPOConfig, "nash_md": NashMDConfig}
    if algorithm in pairs:
        return PreferenceAlarms(pairs[algorithm].model_validate({**COMMON, **sections})), PAIRS_CALM
    policy = {"ppo": PPOConfig, "grpo": GRPOConfig}[algorithm]
    return Alarms(policy.model_validate({**COMMON, **sections})), CALM


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "raft", "distill", "online_dpo", "xpo", "nash_md"])
def test_a_step_without_any_score_rings_once_and_one_with_some_does_not(algorithm: str) -> None:
    watch, calm = watching(algorithm)
    pairs = algorithm in ("online_dpo", "xpo", "nash_md")
    none = {**calm, **({"preference/unscored": 4.0, "preference/tied_fraction": math.nan} if pairs else UNSCORED)}
    some = {**calm, **({"preference/unscored": 3.0} if pairs else SOME_UNSCORED)}
    if algorithm == "raft":
        none |= {"raft/kept_fraction": math.nan, "raft/score_all": math.nan}
    assert watch.check(calm) == []
    assert watch.check(some) == []
    (rung,) = watch.check(none)
    assert rung.kind == "unscored"
    assert ("none of the 4 pairs" if pairs else "none of the 8 responses") in rung.message
    assert "samples/errors.jsonl" in rung.message
    assert watch.check(none) == []
    assert watch.check(some) == []
    assert [alarm.kind for alarm in watch.check(none)] == ["unscored"]


def test_groups_that_are_all_equal_ring_where_responses_are_compared() -> None:
    for estimator, rings in (("grpo", True), ("rloo", True), ("reinforce_plus_plus", False), ("gdpo", False)):
        watch, calm = watching("grpo", grpo={"estimator": estimator})
        assert watch.check({**calm, "reward/group_equal_fraction": 0.99}) == []
        kinds = [alarm.kind for alarm in watch.check({**calm, "reward/group_equal_fraction": 1.0})]
        assert kinds == (["equal_groups"] if rings else []), estimator


@pytest.mark.parametrize(("sampled", "advice"), [(False, "set grpo.dynamic_sampling=true"), (True, "grpo.max_refills")])
def test_the_advice_on_equal_groups_is_not_what_is_set_already(sampled: bool, advice: str) -> None:
    watch, calm = watching("grpo", grpo={"dynamic_sampling": sampled})
    (rung,) = watch.check({**calm, "reward/group_equal_fraction": 1.0})
    assert advice in rung.message
    assert ("dynamic_sampling" in rung.message) is not sampled


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "raft", "distill", "online_dpo", "xpo", "nash_md"])
def test_an_algorithm_that_reports_other_metrics_rings_nothing(algorithm: str) -> None:
    watch, calm = watching(algorithm)
    assert watch.check({"toy/loss": 1.0}) == []
    assert watch.check({"toy/loss": 2.0}) == []
    assert watch.check(calm) == [], "and what comes later is compared with its own start"


def test_a_student_that_begins_beside_its_teacher_rings_only_where_it_is_far() -> None:
    watch, calm = watching("distill")
    assert watch.check({**calm, "teacher/kl_token": -1e-5}) == [], "an estimate below 0 is no start"
    assert watch.check({**calm, "teacher/kl_token": 1e-4}) == []
    assert watch.check({**calm, "teacher/kl_token": 0.009}) == []
    assert [alarm.kind for alarm in watch.check({**calm, "teacher/kl_token": 0.011})] == ["teacher_distance"]


def test_responses_that_are_all_cut_ring_where_they_are_left_out() -> None:
    cut = {**CALM, "rollout/truncated_fraction": 1.0}
    for filtering, kinds in ((True, ["all_truncated"]), (False, [])):
        watch, _ = watching("grpo", grpo={"overlong_filtering": filtering})
        assert watch.check({**cut, "rollout/truncated_fraction": 0.9}) == []
        assert [alarm.kind for alarm in watch.check(cut)] == kinds


# ---- rejection sampling and distillation


@pytest.mark.parametrize(
    ("algorithm", "change", "kind", "said"),
    [
        ("raft", {"raft/kept_fraction": 0.0}, "nothing_kept", "raft.threshold 3 (the mean score is 0.5)"),
        ("raft", {"kl/sequence": 10.1}, "kl", "kl.coef"),
        ("raft", {"rollout/length_mean": 41.0}, "length_explosion", "raft.missing_eos_penalty"),
        ("distill", {"teacher/kl_token": 0.34}, "teacher_distance", "1.7 times its start (0.2)"),
        ("distill", {"rollout/length_mean": 41.0}, "length_explosion", "2.0 times its start (20)"),
        ("distill", {"policy/clip_fraction": 0.21}, "clip_fraction", "distill.minibatches"),
    ],
)
def test_alarms_on_own_samples_ring_once_and_survive_a_checkpoint(
    algorithm: str, change: dict[str, float], kind: str, said: str
) -> None:
    sections = {"raft": {"keep": "threshold", "threshold": 3.0}} if algorithm == "raft" else {}
    watch, calm = watching(algorithm, **sections)
    assert watch.check(calm) == []
    (rung,) = watch.check({**calm, **change})
    assert rung.kind == kind
    assert said in rung.message
    assert not rung.stop
    again, _ = watching(algorithm, **sections)
    again.load_state(watch.state())
    assert again.check({**calm, **change}) == []
    assert again.check(calm) == []
    assert [alarm.kind for alarm in again.check({**calm, **change})] == [kind]


def test_alarms_on_own_samples_begin_where_an_earlier_checkpoint_has_none() -> None:
    watch, calm = watching("raft")
    watch.load_state({})
    assert watch.check(calm) == []


def test_the_bounds_are_the_recipes() -> None:
    raft, calm = watching("raft", kl={"coef": 0.1}, alarms={"kl": 0.5, "length_ratio": 1.2})
    assert raft.check(SAMPLE_CALM)[0].kind == "kl"
    assert [a.kind for a in raft.check({**calm, "rollout/length_mean": 25.0})] == ["length_explosion"]
    distill, calm = watching("distill", alarms={"teacher_ratio": 3.0})
    distill.check(calm)
    assert distill.check({**calm, "teacher/kl_token": 0.59}) == []
    assert [a.kind for a in distill.check({**calm, "teacher/kl_token": 0.61})] == ["teacher_distance"]
