"""Keys of the `reward` section for several reward models together, and for models that score steps."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from tutelage.config.schema import OnlyIf, Schema, setting

HAS_ENSEMBLE = OnlyIf("reward.ensemble names reward models", lambda c: bool(c.reward.ensemble))
PENALISED = OnlyIf(
    "reward.ensemble names reward models and reward.combine is variance_penalised",
    lambda c: bool(c.reward.ensemble) and c.reward.combine == "variance_penalised",
)
ANY_MODEL = OnlyIf(
    "reward.model or reward.ensemble is given", lambda c: c.reward.model is not None or bool(c.reward.ensemble)
)


class EnsembleConfig(Schema):
    """An ensemble of reward models as one reward (Coste et al. 2024), and how the scores of steps become one."""

    ensemble: list[str] = setting(list, "Reward model folders or hub names that score together, two or more.")
    combine: Literal["mean", "min", "variance_penalised"] = setting(
        "mean",
        "Of the members' scores: their mean, the least of them, or the mean less variance_weight x their variance.",
        only_if=HAS_ENSEMBLE,
    )
    variance_weight: float = setting(0.1, "Weight of the variance of the members.", gt=0, only_if=PENALISED)
    ensemble_weight: float = setting(1.0, "Weight of the ensemble in the total reward.", only_if=HAS_ENSEMBLE)
    steps: Literal["min", "product", "last", "mean"] | None = setting(
        None,
        "How a process reward model's scores of the steps become one score; default: min. Other models refuse it.",
        only_if=ANY_MODEL,
    )

    @field_validator("ensemble")
    @classmethod
    def two_or_more(cls, ensemble: list[str]) -> list[str]:
        if len(ensemble) == 1:
            raise PydanticCustomError("ensemble", "must name two or more reward models; one belongs in reward.model")
        return ensemble
