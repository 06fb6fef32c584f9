"""KL coefficients: fixed, or steered to a target KL per sequence. Immutable; `after` returns the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tutelage.errors import CheckpointError, ConfigError, TrainingError

ERROR_CLIP = 0.2


def _require(condition: bool, what: str, fix: str) -> None:
    if not condition:
        raise ConfigError(what, fix=fix)


@dataclass(frozen=True)
class FixedKL:
    """A constant KL coefficient, in reward (or loss) per nat."""

    coef: float

    def __post_init__(self) -> None:
        _require(math.isfinite(self.coef) and self.coef >= 0, f"KL coefficient is {self.coef}", "use a number >= 0")

    def after(self, sequence_kl: float, sequences: int) -> FixedKL:
        """Itself, whatever was seen."""
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fixed", **asdict(self)}


@dataclass(frozen=True)
class AdaptiveKL:
    """Proportional control in log space (Ziegler et al. 2019, section 2.2):

        e = clip(KL / target - 1, -0.2, 0.2),    coef <- coef * (1 + e * n / horizon)

    (the paper's K_beta is n / horizon here, so that the pace does not depend on the batch size).

    KL and target: nats per sequence (summed over tokens, mean over sequences). n: sequences since the last update.
    horizon: sequences over which a full error changes the coefficient by about 20 %; at least n, in practice.
    """

    coef: float
    target: float
    horizon: int

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.coef) and self.coef > 0,
            f"adaptive KL coefficient starts at {self.coef}",
            "start above 0: the control multiplies it, so 0 would stay 0",
        )
        _require(
            math.isfinite(self.target) and self.target > 0,
            f"KL target is {self.target} nats per sequence",
            "use a target above 0",
        )
        _require(self.horizon >= 1, f"KL horizon is {self.horizon} sequences", "use at least 1; 10000 is usual")

    def after(self, sequence_kl: float, sequences: int) -> AdaptiveKL:
        """The controller after `sequences` rollouts whose mean KL per sequence was `sequence_kl`.

        Raises TrainingError when the KL is not finite, ConfigError when the horizon is so short that one update could
        make the coefficient 0 or negative (horizon <= 0.2 n).
        """
        if not math.isfinite(sequence_kl):
            raise TrainingError(f"KL per sequence is {sequence_kl}", fix="look at the logprobs of this step's rollouts")
        _require(
            self.horizon > ERROR_CLIP * sequences,
            f"KL horizon of {self.horizon} sequences is too short for updates of {sequences} sequences",
            f"use a horizon above {ERROR_CLIP * sequences:g}, better several times {sequences}",
        )
        error = min(max(sequence_kl / self.target - 1.0, -ERROR_CLIP), ERROR_CLIP)
        return replace(self, coef=self.coef * (1.0 + error * sequences / self.horizon))

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "adaptive", **asdict(self)}


KLController = FixedKL | AdaptiveKL


def kl_controller_from_state(state: Mapping[str, Any]) -> KLController:
    """The controller whose `state_dict` this is. Raises CheckpointError when it is none, ConfigError for its values."""
    kinds: dict[str, type[FixedKL] | type[AdaptiveKL]] = {"fixed": FixedKL, "adaptive": AdaptiveKL}
    fields = {name: value for name, value in state.items() if name != "kind"}
    kind = kinds.get(state.get("kind", ""))
    if kind is None or set(fields) != set(kind.__dataclass_fields__):
        raise CheckpointError(f"not the state of a KL controller: {dict(state)}", fix="resume from another checkpoint")
    return kind(**fields)
