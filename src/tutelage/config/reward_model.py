"""Schema of the `reward_model` stage."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from tutelage.config.common import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig
from tutelage.config.schema import OnlyIf, Schema, setting

STEP_LOSSES = ("step_bce", "step_mse")
PAIRS = OnlyIf(
    "reward_model.loss is bradley_terry or scaled_bradley_terry", lambda c: c.reward_model.loss not in STEP_LOSSES
)
STEPS = OnlyIf("reward_model.loss is step_bce or step_mse", lambda c: c.reward_model.loss in STEP_LOSSES)
SUBTRACTS = OnlyIf("reward_model.loss is bradley_terry", lambda c: c.reward_model.loss == "bradley_terry")


class RewardModelSettings(Schema):
    epochs: int = setting(1, "Passes over the pairs, or the answers in steps.", ge=1)
    batch_size: int = setting(32, "Pairs, or answers in steps, per optimiser update.", ge=1)
    loss: Literal["bradley_terry", "scaled_bradley_terry", "step_bce", "step_mse"] = setting(
        "bradley_terry",
        "Of pairs: bradley_terry, or scaled_bradley_terry, which weighs each pair by its margin. Of answers in steps "
        "(a process reward model): step_bce for labels from 0 to 1, step_mse for any numbers.",
    )
    step_separator: str = setting("\n", "Text between two steps of an answer.", min_length=1, only_if=STEPS)
    pooling: Literal["auto", "last", "first", "mean", "response_mean"] = setting(
        "auto",
        "Hidden state the head reads: last real token, first token, mean, or mean over the response; auto: last for "
        "decoders, mean for encoders.",
        only_if=PAIRS,
    )
    keep_layers: int | None = setting(
        None, "Keep only the lowest N transformer blocks: a smaller reward model; default: all.", ge=1
    )
    train_layers: int | None = setting(
        None,
        "Train only the topmost N transformer blocks and the head; 0: the head alone, on hidden states that are "
        "computed once for pairs; default: the whole model.",
        ge=0,
    )
    centring: float = setting(
        0.01, "Weight of (chosen + rejected)^2, which keeps scores around 0.", ge=0, only_if=PAIRS
    )
    use_margin: bool = setting(False, "Subtract the data's margin column inside the loss.", only_if=SUBTRACTS)
    centre_on_chosen: bool = setting(
        True,
        "In every model folder written, shift the head's bias so that the mean score of the chosen training answers "
        "(the first 4,096) is 0.",
        only_if=PAIRS,
    )
    folds: int = setting(
        0,
        "Cross-validate: train N models on grouped folds instead of one on all; 0 or 1: off.",
        ge=0,
        only_if=PAIRS,
    )

    @property
    def scores_steps(self) -> bool:
        """Whether this makes a process reward model."""
        return self.loss in STEP_LOSSES

    @field_validator("loss", mode="before")
    @classmethod
    def _no_alias(cls, value: object) -> object:
        if value == "logexp":
            raise PydanticCustomError(
                "alias",
                "must not be logexp: log(1 + exp(rejected - chosen)) is -log sigmoid(chosen - rejected), so it is "
                "bradley_terry without use_margin; set that",
            )
        return value


class RewardModelEvaluation(Schema):
    every: int = setting(0, "Evaluate every N steps; 0: at the start and the end.", ge=0)
    max_rows: int = setting(1024, "Held-out pairs, or answers in steps, used.", ge=1)


class RewardModelConfig(RunConfig):
    algorithm: Literal["reward_model"] = setting("reward_model", "Reward model from pairs, or from labelled steps.")
    model: ModelConfig = setting(..., "Encoder or decoder that becomes the reward model.")
    data: DataConfig = setting(..., "Preference pairs, or answers with a label for each step.")
    reward_model: RewardModelSettings = setting(RewardModelSettings, "The algorithm.")
    optim: OptimConfig = setting(OptimConfig, "Optimiser.")
    evaluation: RewardModelEvaluation = setting(RewardModelEvaluation, "Held-out accuracy.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
