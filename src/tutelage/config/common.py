"""Sections that several stages share: model, data, optimiser, evaluation, checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from tutelage.config.cluster import ClusterConfig
from tutelage.config.schema import OnlyIf, Schema, setting

LORA_ON = OnlyIf("model.lora_rank is above 0", lambda c: c.model.lora_rank > 0)
RECOMPUTES = OnlyIf(
    "model.gradient_checkpointing is true, blocks are trained, and no trained role has context, sequence, tensor or "
    "pipeline above 1",
    lambda c: c.model.gradient_checkpointing and _trains_blocks(c) and not _cuts_layers(c),
)
SHARES_BASE = OnlyIf(
    "model.lora_rank is above 0 and the stage has a critic, reward.model or reward.ensemble", lambda c: _can_share(c)
)
SEVERAL_CHECKPOINTS = OnlyIf("checkpoint.every is above 0", lambda c: c.checkpoint.every > 0)
NO_EVAL_FILE = OnlyIf("data.eval is not given", lambda c: c.data.eval is None)


class ModelConfig(Schema):
    path: str = setting(..., "Hugging Face model folder or hub name.")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "Compute type. bfloat16 keeps float32 master weights and optimiser state."
    )
    chat_template: str | None = setting(
        None,
        "Jinja file, or the name of a built-in template (chatml, plain, hh); default: the tokenizer's own, else plain.",
    )
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass: less memory, more time.")
    activation_bytes: int | None = setting(
        None,
        "Bytes that the blocks of one model may hold for the backward pass of a micro-batch: as few blocks as keep "
        "within it are recomputed; default: all.",
        ge=1,
        only_if=RECOMPUTES,
    )
    lora_rank: int = setting(0, "Rank of LoRA adapters on all linear layers; 0 trains the full model.", ge=0, le=1024)
    lora_alpha: float = setting(32.0, "LoRA scale is lora_alpha / lora_rank.", gt=0, only_if=LORA_ON)
    quantize: Literal["none", "nf4"] = setting(
        "none",
        "nf4: the frozen linear layers under the adapters take 4 bits a weight (QLoRA; needs bitsandbytes).",
        only_if=LORA_ON,
    )
    shared_base: bool = setting(
        False,
        "One copy of the frozen weights for actor, reference, critic, and reward models that are adapters on them "
        "(docs/shared_base.md).",
        only_if=SHARES_BASE,
    )


def _trains_blocks(config: Any) -> bool:
    return getattr(getattr(config, "reward_model", None), "train_layers", None) != 0


def _cuts_layers(config: Any) -> bool:
    """Whether ranks compute one layer of a trained model together: they would have to recompute the same blocks."""
    trained = ("reward",) if config.algorithm == "reward_model" else ("actor", "critic")
    layouts = [config.cluster.settings_of(role) for role in trained]
    return any(max(one.context, one.sequence, one.tensor, one.pipeline) > 1 for one in layouts)


def _can_share(config: Any) -> bool:
    """Whether a run has a second model whose weights could be the policy's base."""
    reward = getattr(config, "reward", None)
    critic = getattr(config, "critic", None)
    own_critic = critic is not None and critic.trunk == "own"
    another = own_critic or (reward is not None and bool(reward.model or reward.ensemble))
    return config.model.lora_rank > 0 and another


class PromptDataConfig(Schema):
    """Rows of which only prompts (and ground truths) are used."""

    train: str = setting(..., "File (jsonl, jsonl.gz, json, csv, parquet), Arrow folder, or hub name (NAME:split).")
    eval: str | None = setting(None, "Held-out data, same kinds; default: eval_fraction of train, split by prompt.")
    eval_fraction: float = setting(0.1, "Share of prompts held out of train.", ge=0, lt=1, only_if=NO_EVAL_FILE)
    format: Literal[
        "auto",
        "text",
        "messages",
        "prompt_completion",
        "preference",
        "implicit_preference",
        "unpaired",
        "prompt_only",
        "stepwise",
    ] = setting("auto", "Row format; auto looks at every row.")
    columns: dict[str, str] = setting(dict, "Rename columns of the file: {name in the file: name Tutelage knows}.")
    limit: int | None = setting(None, "Use the first N rows only, of train and of eval.", ge=1)
    max_prompt_tokens: int = setting(512, "Longer prompts are handled as too_long says.", ge=1)
    too_long: Literal["drop", "truncate", "error"] = setting(
        "drop", "drop the row, truncate (prompts lose their start, responses their end), or error."
    )
    max_bad_fraction: float = setting(0.1, "Refuse data of which more than this share has a problem.", ge=0, le=1)


class DataConfig(PromptDataConfig):
    """Rows with responses."""

    max_response_tokens: int = setting(512, "Longer responses in the data are handled as too_long says.", ge=1)


class OptimConfig(Schema):
    lr: float = setting(1e-5, "Peak learning rate.", gt=0)
    eps: float = setting(1e-5, "Adam epsilon.", gt=0)
    weight_decay: float = setting(0.0, "AdamW decoupled weight decay (not on biases and norms).", ge=0)
    schedule: Literal["linear", "cosine", "constant"] = setting("linear", "Decay to 0 over the run, or none.")
    warmup_steps: int = setting(0, "Optimiser updates of linear warm-up.", ge=0)
    max_grad_norm: float = setting(1.0, "Clip the global gradient norm to this.", gt=0)
    tokens_per_micro_batch: int = setting(
        8192, "Real tokens packed into one forward and backward; changes memory and speed, never the gradient.", ge=1
    )


class CheckpointConfig(Schema):
    every: int = setting(0, "Checkpoint every N steps; 0: only at the end.", ge=0)
    keep: int = setting(
        2, "Keep the newest N checkpoints; the best one is kept besides.", ge=1, only_if=SEVERAL_CHECKPOINTS
    )
    mirror: str | None = setting(
        None, "Copy every checkpoint to MIRROR/NAME, an address that fsspec knows (s3://..., gs://..., file://...)."
    )


class RunConfig(Schema):
    """Keys of every stage."""

    algorithm: str = setting(..., "The stage.")
    implementation: str | None = setting(
        None,
        "Your own algorithm in place of the stage's, with the recipe and the roles of this stage: module, file.py, or "
        "either with :name (docs/your_own.md).",
    )
    name: str = setting("run", "Name of the run folder.", min_length=1)
    seed: int = setting(0, "Keys all randomness.", ge=0)
    output_dir: str = setting("runs", "Folder that holds run folders.")
    max_steps: int | None = setting(None, "Stop after N steps; max_steps=2 makes any recipe a dry run.", ge=1)
    tracking: list[Literal["tensorboard", "wandb"]] = setting(list, "Trackers besides metrics.jsonl.")
    cluster: ClusterConfig = setting(ClusterConfig, "Where the roles run.")
