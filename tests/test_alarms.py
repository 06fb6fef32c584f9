"""Each alarm rings on its own condition, once, and says what to change."""

from __future__ import annotations

import pytest

from tutelage.alarms import Alarms
from tutelage.config import PPOConfig

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
