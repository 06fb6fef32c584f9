"""KL controllers against the update of Ziegler et al. 2019, worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from tutelage.errors import CheckpointError, ConfigError, TrainingError
from tutelage.math.kl_control import AdaptiveKL, FixedKL, kl_controller_from_state


def test_fixed_never_moves() -> None:
    controller = FixedKL(0.05)
    assert controller.after(1000.0, 64) == controller
    assert FixedKL(0.0).coef == 0.0


@pytest.mark.parametrize(
    ("kl", "error"),
    [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (12.0, 0.2), (1e9, 0.2), (0.0, -0.2), (-3.0, -0.2)],
)
def test_adaptive_by_hand(kl: float, error: float) -> None:
    # 256 sequences of a horizon of 1000: a share of 0.256 of the error
    after = AdaptiveKL(coef=0.2, target=6.0, horizon=1000).after(kl, 256)
    assert after.coef == pytest.approx(0.2 * (1 + error * 0.256), rel=1e-12)
    assert (after.target, after.horizon) == (6.0, 1000)


def test_a_horizon_of_full_errors_changes_the_coefficient_by_about_a_fifth() -> None:
    controller = AdaptiveKL(1.0, 1.0, 1000)
    for _ in range(100):
        controller = controller.after(5.0, 10)
    assert controller.coef == pytest.approx(1.002**100)
    assert controller.coef == pytest.approx(math.exp(0.2), rel=1e-3)


def test_controllers_are_values() -> None:
    controller = AdaptiveKL(0.2, 6.0, 1000)
    controller.after(100.0, 10)
    assert controller == AdaptiveKL(0.2, 6.0, 1000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        controller.coef = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("controller", [FixedKL(0.1), AdaptiveKL(0.2, 6.0, 1000).after(7.123, 33)])
def test_state_survives_json_exactly(controller: FixedKL | AdaptiveKL) -> None:
    assert kl_controller_from_state(json.loads(json.dumps(controller.state_dict()))) == controller


@pytest.mark.parametrize(
    "state", [{}, {"kind": "magic", "coef": 1.0}, {"kind": "fixed"}, {"kind": "adaptive", "coef": 1.0, "target": 1.0}]
)
def test_foreign_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="not the state of a KL controller"):
        kl_controller_from_state(state)


def test_bad_settings_are_refused() -> None:
    for coef in (-0.1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="coefficient"):
            FixedKL(coef)
    for values in ((0.0, 6.0, 1000), (0.1, 0.0, 1000), (0.1, math.nan, 1000), (0.1, 6.0, 0)):
        with pytest.raises(ConfigError):
            AdaptiveKL(*values)


def test_updates_that_could_turn_the_sign_and_kl_that_is_not_finite_are_refused() -> None:
    controller = AdaptiveKL(0.1, 6.0, 10)
    with pytest.raises(ConfigError, match="horizon"):
        controller.after(6.0, 50)
    assert controller.after(0.0, 49).coef > 0
    with pytest.raises(TrainingError, match="nan"):
        controller.after(math.nan, 1)
