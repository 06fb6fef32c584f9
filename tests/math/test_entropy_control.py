"""The entropy coefficient, step by step on paper."""

from __future__ import annotations

import math

import pytest

from tutelage.errors import CheckpointError, ConfigError, TrainingError
from tutelage.math.entropy_control import AdaptiveEntropy, entropy_control_from_state


def test_the_level_rises_while_entropy_is_low_and_the_bonus_is_off_while_it_is_high() -> None:
    control = AdaptiveEntropy(level=0.02, target=0.5, step=0.01, maximum=0.04)
    assert control.coef == 0.0, "nothing was measured yet"
    seen = []
    for entropy in (0.6, 0.4, 0.5, 0.3, 0.2, 0.7, 0.49, 0.9, 0.9, 0.9, 0.9, 0.9):
        control = control.after(entropy)
        seen.append((control.level, control.coef))
    levels = [0.01, 0.02, 0.03, 0.04, 0.04, 0.03, 0.04, 0.03, 0.02, 0.01, 0.0, 0.0]
    on = [False, True, True, True, True, False, True, False, False, False, False, False]
    assert [level for level, _ in seen] == pytest.approx(levels)
    assert [coef for _, coef in seen] == pytest.approx([x if y else 0.0 for x, y in zip(levels, on, strict=True)])


def test_it_goes_on_from_its_state() -> None:
    control = AdaptiveEntropy(0.0, 0.5, 0.01, 0.04).after(0.2)
    again = entropy_control_from_state(control.state_dict())
    assert again == control
    assert again.after(0.1).coef == pytest.approx(0.02)
    with pytest.raises(CheckpointError, match="entropy control"):
        entropy_control_from_state({"level": 0.1})


def test_bad_values_are_refused() -> None:
    with pytest.raises(TrainingError, match="nan"):
        AdaptiveEntropy(0.0, 0.5, 0.01, 0.04).after(math.nan)
    for values, said in (
        ((0.05, 0.5, 0.01, 0.04), "coefficient is 0.05"),
        ((-0.1, 0.5, 0.01, 0.04), "coefficient is -0.1"),
        ((0.0, 0.0, 0.01, 0.04), "target"),
        ((0.0, 0.5, 0.0, 0.04), "step"),
        ((0.0, math.inf, 0.1, 0.04), "target"),
    ):
        with pytest.raises(ConfigError, match=said):
            AdaptiveEntropy(*values)
