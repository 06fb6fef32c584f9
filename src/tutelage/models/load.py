"""Models from folders and hub names: always float32 first, every weight accounted for, dropout off."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tutelage.errors import ModelError
from tutelage.models.dropout import disable_dropout
from tutelage.models.heads import Kind, Pooling, ScalarModel, fresh_head, resolve_pooling, saved_head
from tutelage.models.language_model import LanguageModel, backbone_of, logits_function
from tutelage.models.lora import attach, merge_folder
from tutelage.models.paths import (
    HEAD_FILE,
    base_of_adapter,
    context_length,
    is_local,
    load_config,
    loading,
    local_path,
    require_model,
    weights_size,
)
from tutelage.models.precision import DTYPES, MasterWeights
from tutelage.models.probe import choose_layout, require_head
from tutelage.models.trunk import Trunk, embedding_matrix

__all__ = [
    "ModelSettings",
    "context_length",
    "load_causal_lm",
    "load_config",
    "load_scalar_model",
    "load_tokenizer",
    "require_model",
    "value_from",
    "weights_size",
]


class ModelSettings(Protocol):
    """The part of `config.ModelConfig` that loading reads."""

    @property
    def path(self) -> str: ...
    @property
    def dtype(self) -> Literal["float32", "bfloat16"]: ...
    @property
    def gradient_checkpointing(self) -> bool: ...
    @property
    def lora_rank(self) -> int: ...
    @property
    def lora_alpha(self) -> float: ...


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name; an adapter folder without one has its base's.

    Raises ModelNotFoundError, and ModelError where there is no tokenizer.
    """
    base = base_of_adapter(path)
    if base is not None and not (Path(path).expanduser() / "tokenizer_config.json").is_file():
        return load_tokenizer(base)
    if is_local(path) and not any(Path(path).expanduser().glob("*token*")) and not _has_vocabulary(path):
        raise ModelError(
            f"{path} holds no tokenizer", fix="write one into the folder with tokenizer.save_pretrained(folder)"
        )
    with loading(path):
        return AutoTokenizer.from_pretrained(local_path(path), trust_remote_code=False)


def _has_vocabulary(path: str) -> bool:
    return any((Path(path).expanduser() / name).is_file() for name in ("vocab.txt", "vocab.json", "spiece.model"))


def load_causal_lm(
    cfg: ModelSettings, tokenizer: PreTrainedTokenizerBase | None = None, *, seed: int = 0, device: str = "cpu"
) -> LanguageModel:
    """The policy. An adapter that comes with it is merged into the base first; LoRA of this run starts on top of that.

    tokenizer: written along when the model is saved (with its chat template); default: the folder's own.
    Raises ModelNotFoundError; ModelError for an architecture that cannot be trained here, for weights that are missing
    from the folder, and for a tokenizer with more tokens than the model has embeddings.
    """
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(cfg.path)
    if (Path(cfg.path).expanduser() / HEAD_FILE).is_file():
        raise ModelError(f"{cfg.path} is a reward or value model, not a policy", fix="give a causal language model")
    model = _on(device, _load_weights(cfg.path, AutoModelForCausalLM))
    _require_embeddings(model, tokenizer, cfg.path)
    disable_dropout(model)
    trunk = choose_layout(backbone_of(model))
    if not trunk.causal:
        raise ModelError(
            f"{cfg.path} ({type(model).__name__}) is an encoder: its tokens see what comes after them",
            fix="give a causal language model as the policy",
        )
    require_head(model, trunk, logits_function(model))
    adapted = _prepare(model, cfg, seed)
    return LanguageModel(model, trunk, tokenizer, MasterWeights(model, _dtype(cfg.dtype, device)), adapted)


def load_scalar_model(
    cfg: ModelSettings,
    kind: Kind,
    pooling: Pooling | Literal["auto"] = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    needs_head: bool = False,
    keep_layers: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> ScalarModel:
    """A reward model or a critic: any encoder or decoder with a head of one output.

    The head is the folder's, from a folder that Tutelage wrote or from a sequence classifier of transformers with one
    label; else it is new (see `heads.fresh_head`). pooling auto: the folder's, else last for decoders and mean for
    encoders. A critic reads a reward model's folder where `heads.critic_obstacle` allows it.

    keep_layers: keep the lowest N blocks only; the saved folder is then a model of N blocks.
    needs_head: raise ModelError where the head would be new. Raises as `load_causal_lm`, and ModelError for a pooling
    that differs from the folder's, a critic's folder as reward model, and a classifier of several labels.
    """
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(cfg.path)
    head = saved_head(cfg.path)
    if head is None and needs_head:
        raise ModelError(
            f"{cfg.path} has no {kind} head: it is a language model or a bare encoder",
            fix="train a reward model on it first (`tutelage run` with algorithm: reward_model) and give that folder",
        )
    if head is not None and head.kind == "value" and kind == "reward":
        raise ModelError(f"{cfg.path} is a critic, not a reward model", fix="give the folder of a reward model")
    if head is not None and pooling not in ("auto", head.pooling):
        raise ModelError(
            f"the head of {cfg.path} was trained with {head.pooling!r} pooling, the recipe says {pooling!r}",
            fix=f"set pooling to auto or {head.pooling}",
        )
    model = _on(device, _load_weights(cfg.path, AutoModel))
    if getattr(model, "pooler", None) is not None:
        setattr(model, "pooler", None)  # noqa: B010 - a typed module refuses None
    if keep_layers is not None:
        keep_lowest(model, keep_layers)
    _require_embeddings(model, tokenizer, cfg.path)
    disable_dropout(model)
    trunk = choose_layout(model)
    width = trunk.hidden_size
    head = head if head is not None else fresh_head(kind, width, resolve_pooling(pooling, trunk), seed)
    return _scalar(cfg, kind, trunk, head.pooling, head.layers, head.activation, tokenizer, seed, device)


def value_from(source: ScalarModel | LanguageModel, cfg: ModelSettings, *, seed: int = 0) -> ScalarModel:
    """A critic that starts as a copy of a reward model, head included, or of a policy, with a new head near 0.

    cfg: precision, checkpointing and LoRA of the critic; its path is not read. An adapter of the source is merged.
    Raises ModelError for a reward model that cannot be a critic: an encoder, or one that pools otherwise than last.
    """
    if isinstance(source, ScalarModel):
        obstacle = source.critic_obstacle()
        if obstacle is not None:
            raise ModelError(f"the reward model cannot become a critic: {obstacle}", fix="set critic.init to policy")
        trunk, layers, activation = source.plain_trunk(), source.copied_head(), source.activation
    else:
        trunk = source.plain_trunk()
        layers, activation = fresh_head("value", trunk.hidden_size, "last", seed).layers, None
    return _scalar(cfg, "value", trunk, "last", layers, activation, source.tokenizer, seed, str(trunk.device))


def _scalar(
    cfg: ModelSettings,
    kind: Kind,
    trunk: Trunk,
    pooling: Pooling,
    layers: dict[str, nn.Linear],
    activation: str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    device: str,
) -> ScalarModel:
    if kind == "value" and not trunk.causal:
        raise ModelError(
            "a critic on an encoder would see the tokens whose value it predicts",
            fix="set critic.init to policy, or to a causal model",
        )
    adapted = _prepare(trunk.model, cfg, seed)
    model = ScalarModel(trunk, layers, kind, pooling, activation, tokenizer, adapted).to(device)
    model.masters = MasterWeights(model, _dtype(cfg.dtype, device), keep=tuple(layers))
    return model


def _prepare(model: PreTrainedModel, cfg: ModelSettings, seed: int) -> PeftModel | None:
    """Activation checkpointing and LoRA, as the settings say; in place."""
    if cfg.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ModelError(
                f"{type(model).__name__} has no gradient checkpointing", fix="set model.gradient_checkpointing to false"
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return attach(model, cfg.lora_rank, cfg.lora_alpha, seed) if cfg.lora_rank else None


def _on(device: str, model: PreTrainedModel) -> PreTrainedModel:
    model.to(device)  # type: ignore[arg-type]
    return model


def _dtype(name: str, device: str) -> torch.dtype:
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


def _load_weights(path: str, auto: Any) -> PreTrainedModel:
    """float32, with an adapter folder's adapter merged; every parameter must be in the files."""
    base = base_of_adapter(path)
    if base is not None:
        with loading(path):
            return merge_folder(_load_weights(base, auto), Path(path).expanduser())
    config = load_config(path)
    _require_trainable(config, path)
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


def _require_trainable(config: PreTrainedConfig, path: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{path} is an encoder-decoder ({config.model_type})", fix="give a decoder or an encoder")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{path} is quantised", fix="give the unquantised model")


def _require_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    embeddings = embedding_matrix(model).shape[0]
    if len(tokenizer) > embeddings:
        raise ModelError(
            f"the tokenizer of {path} has {len(tokenizer)} tokens, the model {embeddings} embeddings",
            fix="use the tokenizer that the model was trained with",
        )
