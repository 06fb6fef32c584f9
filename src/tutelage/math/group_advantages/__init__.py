"""Advantages without a critic: against the other responses to the prompt, against the batch, or token by token."""

from __future__ import annotations

from tutelage.math.group_advantages.estimators import ESTIMATORS, PASSK_SCALES
from tutelage.math.group_advantages.groups import SCALES, Groups, group_advantages, group_statistics
from tutelage.math.group_advantages.inputs import Estimate, Estimator, EstimatorInputs, estimate
from tutelage.math.group_advantages.tokens import optimal_token_baseline

__all__ = [
    "ESTIMATORS",
    "PASSK_SCALES",
    "SCALES",
    "Estimate",
    "Estimator",
    "EstimatorInputs",
    "Groups",
    "estimate",
    "group_advantages",
    "group_statistics",
    "optimal_token_baseline",
]
