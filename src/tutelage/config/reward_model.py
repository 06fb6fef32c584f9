"""Schema of the `reward_model` stage."""

from __future__ import annotations

from typing import Literal

from tutelage.config.common import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig
from tutelage.config.schema import OnlyIf, Schema, setting

DECODER_ONLY = OnlyIf("reward_model.pooling is auto or mean", lambda c: c.reward_model.pooling in ("auto", "mean"))


class RewardModelSettings(Schema):
    epochs: int = setting(1, "Passes over the pairs.", ge=1)
    batch_size: int = setting(32, "Pairs per optimiser update.", ge=1)
    pooling: Literal["auto", "last", "first", "mean", "response_mean"] = setting(
        "auto",
        "Hidden state the head reads: last real token, first token, mean, or mean over the response; auto: last for "
        "decoders, mean for encoders.",
    )
    keep_layers: int | None = setting(
        None, "Keep only the lowest N transformer blocks: a smaller reward model; default: all.", ge=1
    )
    train_layers: int | None = setting(
        None,
        "Train only the topmost N transformer blocks and the head; 0: the head alone, on hidden states that are "
        "computed once; default: the whole model.",
        ge=0,
    )
    centring: float = setting(0.01, "Weight of (chosen + rejected)^2, which keeps scores around 0.", ge=0)
    use_margin: bool = setting(False, "Subtract the data's margin column inside the loss.")
    centre_on_chosen: bool = setting(
        True,
        "In every model folder written, shift the head's bias so that the mean score of the chosen training answers "
        "(the first 4,096) is 0.",
    )
    folds: int = setting(0, "Cross-validate: train N models on grouped folds instead of one on all; 0 or 1: off.", ge=0)


class RewardModelEvaluation(Schema):
    every: int = setting(0, "Evaluate every N steps; 0: at the start and the end.", ge=0)
    max_rows: int = setting(1024, "Held-out pairs used.", ge=1)


class RewardModelConfig(RunConfig):
    algorithm: Literal["reward_model"] = setting("reward_model", "Bradley-Terry reward model.")
    model: ModelConfig = setting(..., "Encoder or decoder that becomes the reward model.")
    data: DataConfig = setting(..., "Preference pairs.")
    reward_model: RewardModelSettings = setting(RewardModelSettings, "The algorithm.")
    optim: OptimConfig = setting(OptimConfig, "Optimiser.")
    evaluation: RewardModelEvaluation = setting(RewardModelEvaluation, "Held-out accuracy.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
