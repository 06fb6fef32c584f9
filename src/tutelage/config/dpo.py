"""Schema of the `dpo` stage: preference pairs, a policy and its reference."""

from __future__ import annotations

from typing import Literal

from tutelage.config.common import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig
from tutelage.config.schema import Schema, setting


class DPOSettings(Schema):
    epochs: int = setting(1, "Passes over the pairs.", ge=1)
    batch_size: int = setting(32, "Pairs per optimiser update.", ge=1)
    beta: float = setting(0.1, "Strength of the pull to the reference; larger keeps the policy nearer.", gt=0)
    label_smoothing: float = setting(0.0, "Share of preferences taken to be the wrong way round (cDPO).", ge=0, lt=0.5)


class DPOEvaluation(Schema):
    every: int = setting(0, "Evaluate every N steps; 0: at the start and the end.", ge=0)
    max_rows: int = setting(256, "Held-out pairs used.", ge=1)


class DPOConfig(RunConfig):
    algorithm: Literal["dpo"] = setting("dpo", "Direct preference optimisation.")
    model: ModelConfig = setting(..., "The policy; its snapshot at the start is the reference.")
    data: DataConfig = setting(..., "Preference pairs.")
    dpo: DPOSettings = setting(DPOSettings, "The algorithm.")
    optim: OptimConfig = setting(OptimConfig, "Optimiser.")
    evaluation: DPOEvaluation = setting(DPOEvaluation, "Held-out loss and accuracy.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
