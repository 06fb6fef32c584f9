"""Schema of the `sft` stage."""

from __future__ import annotations

from typing import Literal

from tutelage.config.common import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig
from tutelage.config.schema import Schema, setting


class SFTSettings(Schema):
    epochs: int = setting(1, "Passes over the data.", ge=1)
    batch_size: int = setting(32, "Sequences per optimiser update.", ge=1)
    loss_on: Literal["assistant", "completion", "all"] = setting(
        "assistant", "assistant: every assistant turn; completion: the last one; all: prompt tokens too."
    )
    aggregation: Literal["token_mean", "seq_mean_token_mean"] = setting(
        "token_mean", "Denominator of the loss over a mini-batch."
    )
    loss: Literal["nll", "dft"] = setting(
        "nll",
        "nll: maximum likelihood; dft: each token's loss times its probability, so unlikely tokens pull less "
        "(arXiv:2508.05629).",
    )
    neftune_alpha: float | None = setting(
        None, "Noise on input embeddings in training, alpha / sqrt(tokens x width) (NEFTune); 5 is usual.", gt=0
    )


class SFTEvaluation(Schema):
    every: int = setting(0, "Evaluate every N steps; 0: at the start and the end.", ge=0)
    max_rows: int = setting(256, "Held-out sequences used.", ge=1)


class SFTConfig(RunConfig):
    algorithm: Literal["sft"] = setting("sft", "Supervised fine-tuning.")
    model: ModelConfig = setting(..., "The policy.")
    data: DataConfig = setting(..., "Demonstrations.")
    sft: SFTSettings = setting(SFTSettings, "The algorithm.")
    optim: OptimConfig = setting(OptimConfig, "Optimiser.")
    evaluation: SFTEvaluation = setting(SFTEvaluation, "Held-out loss.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
