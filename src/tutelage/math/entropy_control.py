"""The entropy coefficient, steered so that the policy's entropy does not fall below a target.  Immutable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tutelage.errors import CheckpointError, ConfigError, TrainingError


@dataclass(frozen=True)
class AdaptiveEntropy:
    """Adaptive entropy control of Skywork-OR1 (He et al. 2025, 2505.22312):

        level <- level + step  where H <= target,  else level - step,      within [0, maximum]
        coef   = level         where H <= target,  else 0

    H: the policy's entropy in nats per token, of the rollouts of the last step; coef: of the next step, so the bonus
    answers one step late.  A level that has risen stays for the next time that the entropy is low.

    below: whether the last entropy was at or below the target; False before the first.
    """

    level: float
    target: float
    step: float
    maximum: float
    below: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for bounds that no control can keep."""
        if not (math.isfinite(self.level) and 0.0 <= self.level <= self.maximum):
            raise ConfigError(
                f"the entropy coefficient is {self.level}, its bound {self.maximum}",
                fix="start between 0 and the bound",
            )
        for name, value in (("target", self.target), ("step", self.step), ("largest coefficient", self.maximum)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"the {name} of the entropy control is {value}", fix="use a number above 0")

    @property
    def coef(self) -> float:
        """Weight of the entropy bonus."""
        return self.level if self.below else 0.0

    def after(self, entropy: float) -> AdaptiveEntropy:
        """The controller after a step whose rollouts had this entropy.  Raises TrainingError where it is not finite."""
        if not math.isfinite(entropy):
            raise TrainingError(f"the entropy of the rollouts is {entropy}", fix="look at the logprobs of this step")
        below = entropy <= self.target
        level = self.level + (self.step if below else -self.step)
        return replace(self, level=min(max(level, 0.0), self.maximum), below=below)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


def entropy_control_from_state(state: Mapping[str, Any]) -> AdaptiveEntropy:
    """The controller whose `state_dict` this is.  Raises CheckpointError where it is none."""
    if set(state) != set(AdaptiveEntropy.__dataclass_fields__):
        raise CheckpointError(
            f"not the state of an entropy control: {dict(state)}", fix="resume from another checkpoint"
        )
    return AdaptiveEntropy(**state)
