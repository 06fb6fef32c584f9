"""Models spread over ranks, loaded so that no rank ever holds all weights; every rank calls these together.

In two passes, so that what is checked is checked on the real weights in float32 and costs no more than a shard of them:

    1. The bare model, its shards over all ranks; the packing probe and the check of the output layer run on it.
    2. The model as it will be used: adapter, head, tensor-parallel cuts, shards of the layout, compute type.

An architecture whose files need more than a change of names (merged experts) and an adapter folder are loaded whole in
the host's memory of every rank, with a warning, and cut from there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tutelage.errors import ModelError
from tutelage.models.computation import Computation
from tutelage.models.dropout import disable_dropout
from tutelage.models.heads import Head, Kind, Pooling, ScalarModel, fresh_head, resolve_pooling, weight_files
from tutelage.models.language_model import LanguageModel, backbone_of, logits_function
from tutelage.models.lora import plain_name
from tutelage.models.meta import Read, StoredWeights, fill, fill_buffers, on_the_host, skeleton
from tutelage.models.paths import base_of_adapter, load_config
from tutelage.models.precision import MasterWeights
from tutelage.models.probe import choose_layout, require_head
from tutelage.models.sharding import Sharding, place
from tutelage.models.trunk import Layout, Trunk
from tutelage.models.weights import (
    ModelSettings,
    blocks_of,
    compute_dtype,
    keep_lowest,
    load_weights,
    prepare,
    recompute_of,
    require_embeddings,
    require_trainable,
    without_pooler,
)


def sharded_causal_lm(
    cfg: ModelSettings, tokenizer: PreTrainedTokenizerBase, sharding: Sharding, *, seed: int, frozen: bool
) -> LanguageModel:
    """`load.load_causal_lm` on the ranks of a sharding. Raises as it does, on every rank."""
    sharding = replace(sharding, dtype=compute_dtype(cfg.dtype, sharding.device.type))
    source = _Source.of(cfg.path, AutoModelForCausalLM)
    require_embeddings(source.bare(), tokenizer, cfg.path)

    def look(model: PreTrainedModel) -> Trunk:
        trunk = choose_layout(backbone_of(model))
        if not trunk.causal:
            raise ModelError(
                f"{cfg.path} ({type(model).__name__}) is an encoder: its tokens see what comes after them",
                fix="give a causal language model as the policy",
            )
        require_head(model, trunk, logits_function(model))
        return trunk

    seen = _look(source, sharding, look)
    model = source.bare()
    backbone_of(model).set_attn_implementation(seen.attention)
    adapted = _prepared(model, cfg, seed, frozen)
    backbone = backbone_of(model)
    trunk = Trunk(backbone, seen.layout, seen.causal, sharding.tokens, recompute_of(backbone, cfg))
    made = LanguageModel(model, trunk, tokenizer, MasterWeights(model, torch.float32), adapted)
    made.sharding = sharding
    _rest_in(model, sharding.dtype if frozen else torch.float32)
    sharding.spread(made, blocks_of(trunk.model))
    _fill(source, model, model, sharding, "")
    made.masters = MasterWeights(model, _copy_type(sharding))
    return made


def sharded_scalar_model(
    cfg: ModelSettings,
    kind: Kind,
    pooling: Pooling | Literal["auto"],
    head: Head | None,
    tokenizer: PreTrainedTokenizerBase,
    sharding: Sharding,
    *,
    keep_layers: int | None,
    seed: int,
    frozen: bool,
) -> ScalarModel:
    """`load.load_scalar_model` on the ranks of a sharding; head: the folder's own, or None."""
    sharding = replace(sharding, dtype=compute_dtype(cfg.dtype, sharding.device.type))
    source = _Source.of(cfg.path, AutoModel, keep_layers)
    require_embeddings(source.bare(), tokenizer, cfg.path)
    seen = _look(source, sharding, choose_layout)
    if kind == "value" and not seen.causal:
        raise ModelError(
            "a critic on an encoder would see the tokens whose value it predicts",
            fix="set critic.init to policy, or to a causal model",
        )
    backbone = source.bare()
    backbone.set_attn_implementation(seen.attention)
    trunk = Trunk(backbone, seen.layout, seen.causal, sharding.tokens, recompute_of(backbone, cfg))
    if head is None:
        head = fresh_head(kind, trunk.hidden_size, resolve_pooling(pooling, trunk), seed)
    adapted = _prepared(backbone, cfg, seed, frozen)
    _rest_in(backbone, sharding.dtype if frozen else torch.float32)
    layers = {name: layer.to(sharding.storage).requires_grad_(not frozen) for name, layer in head.layers.items()}
    made = ScalarModel(trunk, layers, kind, head.pooling, head.activation, tokenizer, adapted)
    made.sharding = sharding
    made.masters = MasterWeights(made, torch.float32)
    sharding.spread(made, blocks_of(backbone), keep=layers.values())
    _fill(source, made, backbone, sharding, "backbone.")
    made.masters = MasterWeights(made, _copy_type(sharding), keep=tuple(layers))
    return made


def _copy_type(sharding: Sharding) -> torch.dtype:
    """FSDP casts as it gathers; without it, a copy in the compute type computes."""
    return torch.float32 if sharding.mesh is not None else sharding.dtype


def _prepared(model: PreTrainedModel, cfg: ModelSettings, seed: int, frozen: bool) -> PeftModel | None:
    with on_the_host(model):
        adapted = prepare(model, cfg, seed)
    if frozen:
        model.requires_grad_(False)
    return adapted


def _rest_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters alone; buffers keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


# ---- where the weights come from ----


@dataclass(eq=False)
class _Source:
    """bare: makes the float32 model without head or storage.  read: a rank's part of one of its weights."""

    path: str
    bare: Callable[[], PreTrainedModel]
    read: Read
    stored: StoredWeights | None
    whole: PreTrainedModel | None

    @classmethod
    def of(cls, path: str, auto: Any, keep_layers: int | None = None) -> _Source:
        """Raises ModelError for a folder that is incomplete or of a kind that cannot be trained."""
        config = load_config(path)
        require_trainable(config, path)

        def bare() -> PreTrainedModel:
            model = without_pooler(skeleton(auto, config, path))
            if keep_layers is not None:
                keep_lowest(model, keep_layers)
            disable_dropout(model)
            return model

        shell = bare()
        reason = "it is an adapter"
        if base_of_adapter(path) is None:
            stored = StoredWeights.of(path, weight_files(path), shell.base_model_prefix)
            missing = [name for name, _ in shell.named_parameters() if not stored.has(name)]
            if not missing:
                return cls(path, bare, stored.read, stored, None)
            reason = f"its files have no {missing[0]}"
        whole = without_pooler(load_weights(path, auto))
        if keep_layers is not None:
            keep_lowest(whole, keep_layers)
        warnings.warn(
            f"{path} is loaded whole in the memory of every rank: {reason}, so its parts cannot be read one by one",
            stacklevel=4,
        )
        weights = dict(whole.named_parameters())
        return cls(path, bare, lambda name, like: _cut(weights[name].detach(), like), None, whole)


def _cut(weight: Tensor, like: Tensor) -> Tensor:
    shape, offset = place(like)
    return weight[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].to(like.dtype, copy=True)


def _fill(source: _Source, module: nn.Module, model: PreTrainedModel, sharding: Sharding, prefix: str) -> None:
    """Weights and buffers of `module`, which holds `model` under `prefix`, in place. Raises on every rank or none."""
    error: Exception | None = None

    def read(name: str, like: Tensor) -> Tensor:
        return source.read(plain_name(name.removeprefix(prefix)), like).to(sharding.storage)

    try:
        if source.whole is not None:
            _copy_buffers(source.whole, model, sharding.device)
        # before the weights: what makes a buffer may make the weights beside it too (Gemma's scaled embedding)
        fill_buffers(model, sharding.device, source.path, source.stored)
        fill(module, read)
        for parameter in module.parameters():  # adapters and heads that were made with storage
            if parameter.device != sharding.storage:
                parameter.data = parameter.data.to(sharding.storage)
    except Exception as problem:
        error = problem
    sharding.agree(error)


def _copy_buffers(source: PreTrainedModel, model: PreTrainedModel, device: torch.device) -> None:
    for name, buffer in source.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf in (held := _held(model, owner)):  # not where a block is on another pipeline stage
            held[leaf] = buffer.to(device)


def _held(model: PreTrainedModel, owner: str) -> dict[str, Tensor | None]:
    try:
        return model.get_submodule(owner)._buffers
    except AttributeError:
        return {}


# ---- the first pass ----


@dataclass(frozen=True)
class _Seen:
    layout: Layout
    causal: bool
    attention: str


@torch.no_grad()
def _look(source: _Source, sharding: Sharding, look: Callable[[PreTrainedModel], Trunk]) -> _Seen:
    """What the probes say of the model; its shards are gone before the model that is kept gets its own."""
    probing = sharding.probing()
    model = source.bare()
    root = Computation(model)
    backbone = model.base_model
    assert isinstance(backbone, PreTrainedModel)
    probing.shard(root, blocks_of(backbone))
    _fill(source, model, model, probing, "")
    model.eval()
    trunk = root(lambda: look(model))
    return _Seen(trunk.layout, trunk.causal, backbone.config._attn_implementation)
