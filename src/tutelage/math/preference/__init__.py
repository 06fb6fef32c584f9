"""Losses of preference pairs, per pair: pure functions of logprobs; `PREFERENCE_LOSSES` has them by name."""

from tutelage.math.preference.inputs import (
    PreferenceInputs,
    PreferenceLossFunction,
    PreferenceSettings,
    PreferenceTerms,
)
from tutelage.math.preference.losses import PREFERENCE_LOSSES

__all__ = [
    "PREFERENCE_LOSSES",
    "PreferenceInputs",
    "PreferenceLossFunction",
    "PreferenceSettings",
    "PreferenceTerms",
]
