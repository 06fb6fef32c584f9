"""Schema of the `kto` stage: single answers marked desirable or not, a policy and its reference."""

from __future__ import annotations

from typing import Literal

from tutelage.config.common import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig
from tutelage.config.schema import OnlyIf, Schema, setting

WEIGHTED = OnlyIf("kto.loss is kto or apo_zero_unpaired", lambda c: c.kto.loss != "bco")


class KTOSettings(Schema):
    epochs: int = setting(1, "Passes over the answers.", ge=1)
    batch_size: int = setting(32, "Answers per optimiser update; kto takes its KL estimate from one update's.", ge=2)
    loss: Literal["kto", "apo_zero_unpaired", "bco"] = setting(
        "kto",
        "kto: against the policy's KL; apo_zero_unpaired: against 0; bco: a classifier, shifted by the mean reward.",
    )
    beta: float = setting(0.1, "Strength of the pull to the reference; larger keeps the policy nearer.", gt=0)
    desirable_weight: float = setting(1.0, "Weight of the loss of desirable answers.", ge=0, only_if=WEIGHTED)
    undesirable_weight: float = setting(1.0, "Weight of the loss of undesirable answers.", ge=0, only_if=WEIGHTED)


class KTOEvaluation(Schema):
    every: int = setting(0, "Evaluate every N steps; 0: at the start and the end.", ge=0)
    max_rows: int = setting(256, "Held-out answers used.", ge=1)


class KTOConfig(RunConfig):
    algorithm: Literal["kto"] = setting("kto", "Preference optimisation from single answers.")
    model: ModelConfig = setting(..., "The policy; its snapshot at the start is the reference.")
    data: DataConfig = setting(..., "Answers marked desirable or not; a preference pair is one of each.")
    kto: KTOSettings = setting(KTOSettings, "The algorithm.")
    optim: OptimConfig = setting(OptimConfig, "Optimiser.")
    evaluation: KTOEvaluation = setting(KTOEvaluation, "Held-out loss, and how well rewards tell the answers apart.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
