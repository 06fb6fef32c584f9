"""When to generate, learn and publish.  A schedule knows no algorithm, an algorithm no schedule."""

from __future__ import annotations

from typing import Any

from tutelage.errors import ConfigError
from tutelage.protocols import Algorithm, Transport
from tutelage.schedules.bounded_async import BoundedAsync
from tutelage.schedules.one_step_off import OneStepOff
from tutelage.schedules.refill import refills_of
from tutelage.schedules.synchronous import Synchronous
from tutelage.schedules.training import Draw, GeneratingAlgorithm, Schedule, StepResult

__all__ = [
    "BoundedAsync",
    "Draw",
    "GeneratingAlgorithm",
    "OneStepOff",
    "Schedule",
    "StepResult",
    "Synchronous",
    "make_schedule",
]


def make_schedule(algorithm: Algorithm, transport: Transport, roles: Any, cfg: Any) -> Schedule:
    """The schedule of a recipe; a recipe without a `schedule` section is synchronous.

    Raises ConfigError where the algorithm or the rollout engine cannot work so.
    """
    settings = getattr(cfg, "schedule", None)
    if settings is None or settings.kind == "synchronous":
        return Synchronous(algorithm, transport, roles, cfg)
    if refills_of(algorithm, cfg):
        raise ConfigError(
            f"schedule.kind is {settings.kind}, but whether a step needs further prompts is known only when its scores "
            "are: nothing can be begun ahead",
            fix="use schedule.kind=synchronous, or switch dynamic sampling off",
        )
    if settings.kind == "one_step_off":
        return OneStepOff(algorithm, transport, roles, cfg)
    return BoundedAsync(
        algorithm,
        transport,
        roles,
        cfg,
        max_staleness=settings.max_staleness,
        ahead=settings.ahead,
        partial_tokens=settings.partial_tokens,
    )
