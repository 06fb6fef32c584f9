"""Models from folders and hub names: always float32 first, every weight accounted for, dropout off."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tutelage.errors import ModelError
from tutelage.models.dropout import disable_dropout
from tutelage.models.heads import Kind, Pooling, ScalarModel, fresh_head, resolve_pooling, saved_head
from tutelage.models.language_model import LanguageModel, backbone_of, logits_function
from tutelage.models.load_sharded import sharded_causal_lm, sharded_scalar_model
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
from tutelage.models.precision import MasterWeights
from tutelage.models.probe import choose_layout, require_head
from tutelage.models.sharding import Sharding
from tutelage.models.trunk import Trunk
from tutelage.models.weights import (
    ModelSettings,
    blocks_of,
    compute_dtype,
    cpu_has_bfloat16,
    keep_lowest,
    load_weights,
    loading_device,
    on,
    prepare,
    recompute_of,
    require_embeddings,
    without_pooler,
)

__all__ = [
    "ModelSettings",
    "bare_policy",
    "blocks_of",
    "context_length",
    "cpu_has_bfloat16",
    "keep_lowest",
    "load_causal_lm",
    "load_config",
    "load_scalar_model",
    "load_tokenizer",
    "require_model",
    "value_from",
    "weights_size",
]


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
    cfg: ModelSettings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    sharding: Sharding | None = None,
    frozen: bool = False,
) -> LanguageModel:
    """The policy. An adapter that comes with it is merged into the base first; LoRA of this run starts on top of that.

    tokenizer: written along when the model is saved (with its chat template); default: the folder's own.
    sharding: spread over ranks, every one of which calls this; none ever holds all weights.  `device` is its device.
    frozen: with a sharding, weights rest in the compute type, since nothing is trained.
    Raises ModelNotFoundError; ModelError for an architecture that cannot be trained here, for weights that are missing
    from the folder, for a tokenizer with more tokens than the model has embeddings, and for a quantised base that is
    spread over ranks; as `quantize.quantize`.
    """
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(cfg.path)
    if sharding is not None:
        _require_policy(cfg.path)
        _require_unquantized(cfg)
        return sharded_causal_lm(cfg, tokenizer, sharding, seed=seed, frozen=frozen)
    model, trunk = bare_policy(cfg, tokenizer, loading_device(cfg, device))
    adapted = prepare(model, cfg, seed, device)
    trunk.recompute = recompute_of(trunk.model, cfg)
    return LanguageModel(model, trunk, tokenizer, MasterWeights(model, compute_dtype(cfg.dtype, device)), adapted)


def _require_unquantized(cfg: ModelSettings) -> None:
    if cfg.quantize != "none":
        raise ModelError(
            f"quantize is {cfg.quantize}, and the weights are spread over ranks: what is cut is not packed",
            fix="set model.quantize to none, or use replicas alone",
        )


def _require_policy(path: str) -> None:
    if (Path(path).expanduser() / HEAD_FILE).is_file():
        raise ModelError(f"{path} is a reward or value model, not a policy", fix="give a causal language model")


def bare_policy(
    cfg: ModelSettings, tokenizer: PreTrainedTokenizerBase, device: str = "cpu"
) -> tuple[PreTrainedModel, Trunk]:
    """The whole causal language model of `cfg` in float32, checked, without an adapter of this run, and its trunk.

    Raises as `load_causal_lm`.
    """
    _require_policy(cfg.path)
    model = on(device, load_weights(cfg.path, AutoModelForCausalLM))
    require_embeddings(model, tokenizer, cfg.path)
    disable_dropout(model)
    trunk = choose_layout(backbone_of(model))
    if not trunk.causal:
        raise ModelError(
            f"{cfg.path} ({type(model).__name__}) is an encoder: its tokens see what comes after them",
            fix="give a causal language model as the policy",
        )
    require_head(model, trunk, logits_function(model))
    return model, trunk


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
    sharding: Sharding | None = None,
    frozen: bool = False,
) -> ScalarModel:
    """A reward model or a critic: any encoder or decoder with a head of one output.

    The head is the folder's, from a folder that Tutelage wrote or from a sequence classifier of transformers with one
    label; else it is new (see `heads.fresh_head`). pooling auto: the folder's, else last for decoders and mean for
    encoders. A critic reads a reward model's folder where `heads.critic_obstacle` allows it.

    keep_layers: keep the lowest N blocks only; the saved folder is then a model of N blocks.
    sharding, frozen: as `load_causal_lm`.
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
    if sharding is not None:
        _require_unquantized(cfg)
        return sharded_scalar_model(
            cfg, kind, pooling, head, tokenizer, sharding, keep_layers=keep_layers, seed=seed, frozen=frozen
        )
    model = without_pooler(on(loading_device(cfg, device), load_weights(cfg.path, AutoModel)))
    if keep_layers is not None:
        keep_lowest(model, keep_layers)
    require_embeddings(model, tokenizer, cfg.path)
    disable_dropout(model)
    trunk = choose_layout(model)
    width = trunk.hidden_size
    head = head if head is not None else fresh_head(kind, width, resolve_pooling(pooling, trunk), seed)
    return _scalar(cfg, kind, trunk, head.pooling, head.layers, head.activation, tokenizer, seed, device)


def value_from(source: ScalarModel | LanguageModel, cfg: ModelSettings, *, seed: int = 0) -> ScalarModel:
    """A critic that starts as a copy of a reward model, head included, or of a policy, with a new head near 0.

    cfg: precision, checkpointing and LoRA of the critic; its path is not read. An adapter of the source is merged.
    Raises ModelError for a reward model that cannot be a critic: an encoder, or one that pools otherwise than last; and
    for a source that is spread over ranks.
    """
    if source.sharding is not None:
        raise ModelError(
            "a critic cannot be copied from a model that is spread over ranks",
            fix="load it from the same folder: load_scalar_model(cfg, 'value', sharding=...)",
        )
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
    adapted = prepare(trunk.model, cfg, seed, device)
    trunk.recompute = recompute_of(trunk.model, cfg)
    model = ScalarModel(trunk, layers, kind, pooling, activation, tokenizer, adapted).to(device)
    model.masters = MasterWeights(model, compute_dtype(cfg.dtype, device), keep=tuple(layers))
    return model
