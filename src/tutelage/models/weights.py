"""What happens to the weights of a model between its folder and a head: reading, checks, adapters, cuts in depth."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from tutelage.errors import ModelError
from tutelage.models.lora import attach, merge_folder
from tutelage.models.paths import base_of_adapter, load_config, loading, local_path
from tutelage.models.precision import DTYPES
from tutelage.models.quantize import quantize
from tutelage.models.recompute import Recompute
from tutelage.models.trunk import embedding_matrix


class ModelSettings(Protocol):
    """The part of `config.ModelConfig` that loading reads."""

    @property
    def path(self) -> str: ...
    @property
    def dtype(self) -> Literal["float32", "bfloat16"]: ...
    @property
    def gradient_checkpointing(self) -> bool: ...
    @property
    def activation_bytes(self) -> int | None: ...
    @property
    def lora_rank(self) -> int: ...
    @property
    def lora_alpha(self) -> float: ...
    @property
    def quantize(self) -> Literal["none", "nf4"]: ...


def prepare(model: PreTrainedModel, cfg: ModelSettings, seed: int, device: str = "cpu") -> PeftModel | None:
    """Activation checkpointing, a quantised base on `device`, and LoRA, as the settings say; in place.

    Raises as `recompute_all`, `quantize.quantize` and `lora.attach`.
    """
    if cfg.gradient_checkpointing:
        recompute_all(model)
    pack(model, cfg, device)
    return attach(model, cfg.lora_rank, cfg.lora_alpha, seed) if cfg.lora_rank else None


def pack(model: PreTrainedModel, cfg: ModelSettings, device: str) -> None:
    """The base in the form that the settings name; the rest of the model follows a quantised one to `device`."""
    if cfg.quantize != "none":
        quantize(model, compute_dtype(cfg.dtype, device), device)
        on(device, model)


def loading_device(cfg: ModelSettings, device: str) -> str:
    """Where whole float32 weights lie first: of a base that is quantised only the packed ones reach an accelerator."""
    return device if cfg.quantize == "none" else "cpu"


def recompute_all(model: PreTrainedModel) -> None:
    """Every block runs again in the backward pass.  Raises ModelError where the architecture has no such switch."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} has no gradient checkpointing", fix="set model.gradient_checkpointing to false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})


def recompute_of(backbone: PreTrainedModel, cfg: ModelSettings) -> Recompute | None:
    """Which blocks a pass of a trained backbone recomputes, where the settings give a budget.

    Raises ModelError where its blocks cannot be switched one by one.
    """
    if not cfg.gradient_checkpointing or cfg.activation_bytes is None:
        return None
    blocks = blocks_of(backbone)
    if not all(isinstance(block, GradientCheckpointingLayer) for block in blocks):
        raise ModelError(
            f"the blocks of {type(backbone).__name__} cannot be recomputed one by one",
            fix="leave model.activation_bytes out: all blocks are recomputed then",
        )
    return Recompute(list(blocks), cfg.activation_bytes)


def on(device: str, model: PreTrainedModel) -> PreTrainedModel:
    model.to(device)  # type: ignore[arg-type]
    return model


def compute_dtype(name: str, device: str) -> torch.dtype:
    dtype = DTYPES[name]
    if dtype == torch.bfloat16 and device == "cpu" and not cpu_has_bfloat16():
        warnings.warn(
            "this processor has no bfloat16 instructions: dtype bfloat16 is correct here, but many times slower than "
            "float32",
            stacklevel=2,
        )
    return dtype


def cpu_has_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 kernels for this processor; True where torch was built without it and cannot say."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return True


def load_weights(path: str, auto: Any) -> PreTrainedModel:
    """float32, with an adapter folder's adapter merged; every parameter must be in the files."""
    base = base_of_adapter(path)
    if base is not None:
        with loading(path):
            return merge_folder(load_weights(base, auto), Path(path).expanduser())
    config = load_config(path)
    require_trainable(config, path)
    with loading(path):
        model, info = auto.from_pretrained(
            local_path(path),
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
    mismatched = sorted(str(key) for key in info["mismatched_keys"])
    if missing or mismatched:
        what = (
            f"has no weights for {_some(missing)}" if missing else f"has weights of another shape: {_some(mismatched)}"
        )
        raise ModelError(
            f"{path} {what} of {type(model).__name__}; they would start random",
            fix="give a complete model folder of this kind",
        )
    broken = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    if broken:
        raise ModelError(
            f"{path} has weights that are NaN or infinite: {_some(broken)}",
            fix="train it again with a lower optim.lr, or give an earlier checkpoint",
        )
    return model


def without_pooler(model: PreTrainedModel) -> PreTrainedModel:
    """The bare encoder, in place: a pooling layer belongs to a head."""
    if getattr(model, "pooler", None) is not None:
        setattr(model, "pooler", None)  # noqa: B010 - a typed module refuses None
    return model


def keep_lowest(model: PreTrainedModel, layers: int) -> None:
    """Drop the blocks above the lowest `layers`, in place. Raises ModelError for a number the model cannot have."""
    depth = int(model.config.num_hidden_layers)
    if not 1 <= layers <= depth:
        raise ModelError(f"keep_layers is {layers}, the model has {depth} blocks", fix=f"use 1 to {depth}")
    del blocks_of(model)[layers:]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer blocks of a backbone: its module list as long as the config says."""
    depth = int(model.config.num_hidden_layers)
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def require_trainable(config: PreTrainedConfig, path: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{path} is an encoder-decoder ({config.model_type})", fix="give a decoder or an encoder")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{path} is quantised", fix="give the unquantised model")


def require_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    embeddings = embedding_matrix(model).shape[0]
    if len(tokenizer) > embeddings:
        raise ModelError(
            f"the tokenizer of {path} has {len(tokenizer)} tokens, the model {embeddings} embeddings",
            fix="use the tokenizer that the model was trained with",
        )
