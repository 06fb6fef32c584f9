"""The models of one process on one frozen base (Hydra-RLHF: Santacroce et al. 2023, arXiv:2309.00754).

    actor      base + adapter, under the base's own output head
    reference  the actor's modules with the adapter off
    critic     base + adapter + value head
    reward     base + adapter + reward head, frozen

Every model has modules of its own.  An adapter, a mode and gradient checkpointing belong to one model, so a forward or
a recomputation in a backward pass cannot meet another model's adapter.  The parameters of the base are the same objects
in all of them, without gradient.

With W weights in the base and w in one adapter, in float32, weights and Adam's two moments of actor and critic on a
shared base take 4 W + 2 * 12 w bytes, four full copies 32 W, full SFT 12 W.  Gradients take 4 bytes a trained weight
besides, of one role at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tutelage.errors import ModelError
from tutelage.models.heads import ScalarModel, fresh_head, saved_head, weight_files
from tutelage.models.language_model import LanguageModel
from tutelage.models.load import bare_policy, load_tokenizer
from tutelage.models.lora import merging
from tutelage.models.meta import StoredWeights
from tutelage.models.paths import ADAPTER_FILE, HEAD_FILE, is_local, load_config, read_json
from tutelage.models.precision import MasterWeights
from tutelage.models.quantize import rounded
from tutelage.models.trunk import Trunk
from tutelage.models.weights import (
    ModelSettings,
    compute_dtype,
    keep_lowest,
    loading_device,
    pack,
    prepare,
    recompute_all,
    recompute_of,
)

ADAPTER = "adapter"
"""Folder of the adapter alone, in the folder of a model that was trained with one."""

CLOSE = 1e-5
"""A merged weight may differ from base + adapter by this part of the largest weight of its matrix: rounding."""

Model = TypeVar("Model", bound=PreTrainedModel)

CriticStart = Callable[[Mapping[str, ScalarModel]], str | None]
"""Of the reward models on the base, by folder: the one whose adapter and head the critic copies; None: a new one."""


@dataclass(frozen=True, eq=False)
class SharedModels:
    """critic    None where none was asked for.
    rewards   by folder.
    obstacles why a folder's reward model cannot be an adapter on this base, by folder.
    cautions  what is not quite the same for one that is, by folder.
    """

    policy: LanguageModel
    critic: ScalarModel | None
    rewards: Mapping[str, ScalarModel]
    obstacles: Mapping[str, str]
    cautions: Mapping[str, str]

    def base(self) -> dict[str, Tensor]:
        """The shared weights, by their names in the actor's model."""
        return {name: p for name, p in self.policy.model.named_parameters() if ".lora_" not in name}


def load_shared_base(
    cfg: ModelSettings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    rewards: Mapping[str, PreTrainedTokenizerBase | None] | None = None,
    critic: CriticStart | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> SharedModels:
    """The policy of `cfg` with an adapter, and what else stands on its base.

    rewards: folders of reward models that were trained as an adapter on this base, each with its tokenizer; one that
    was not is in `obstacles` of what is returned.
    critic: where the critic starts; None: there is no critic.  A new adapter has the rank of `cfg`, a copied one the
    reward model's.
    A base that is quantised is one for all.  A reward model that was trained on it as it was before is taken, and
    named in `cautions`.
    Raises as `load.load_causal_lm`, and ModelError for `lora_rank` 0.
    """
    if cfg.lora_rank < 1:
        raise ModelError(
            f"lora_rank is {cfg.lora_rank}: without adapters every model needs weights of its own",
            fix="set model.lora_rank above 0, or model.shared_base to false",
        )
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(cfg.path)
    model, trunk = bare_policy(cfg, tokenizer, loading_device(cfg, device))
    found = {folder: _fit(trunk, folder, cfg, device) for folder in rewards or {}}
    obstacles = {folder: one.obstacle for folder, one in found.items() if one.obstacle is not None}
    cautions = {folder: one.caution for folder, one in found.items() if one.caution is not None}
    pack(model, cfg, device)
    made = {
        folder: _reward(trunk, folder, own).to(device)
        for folder, own in (rewards or {}).items()
        if folder not in obstacles
    }
    value = None if critic is None else _critic(trunk, cfg, critic(made), made, tokenizer, seed, device).to(device)
    adapted = prepare(model, cfg, seed, device)
    trunk.recompute = recompute_of(trunk.model, cfg)
    dtype = compute_dtype(cfg.dtype, device)
    for scalar in [*made.values(), *([] if value is None else [value])]:
        heads = tuple(name for name, _ in scalar.named_children() if name != "backbone")
        scalar.masters = MasterWeights(scalar, dtype, keep=heads)
    policy = LanguageModel(model, trunk, tokenizer, MasterWeights(model, dtype), adapted)
    return SharedModels(policy, value, made, obstacles, cautions)


def twin(model: Model) -> Model:
    """The same model in new modules: its parameters are those of `model`, its buffers are copies."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


# ---- the critic


def _critic(
    trunk: Trunk,
    cfg: ModelSettings,
    start: str | None,
    rewards: Mapping[str, ScalarModel],
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    device: str,
) -> ScalarModel:
    if start is None:
        backbone = twin(trunk.model)
        adapted = prepare(backbone, cfg, seed, device)
        head = fresh_head("value", trunk.hidden_size, "last", seed)
        own = Trunk(backbone, trunk.layout, trunk.causal, recompute=recompute_of(backbone, cfg))
        return ScalarModel(own, head.layers, "value", "last", None, tokenizer, adapted)
    source = rewards[start]
    backbone = _cut(trunk, start)
    if cfg.gradient_checkpointing:
        recompute_all(backbone)
    adapted = _adapter_of(backbone, start, trained=True)
    own = Trunk(backbone, trunk.layout, trunk.causal, recompute=recompute_of(backbone, cfg))
    return ScalarModel(own, source.copied_head(), "value", "last", source.activation, tokenizer, adapted)


# ---- reward models


def folder_obstacle(folder: str, base: PreTrainedConfig) -> str | None:
    """Why the reward model of a folder cannot be an adapter on a base, as far as it shows before a weight is read."""
    adapter = Path(folder).expanduser() / ADAPTER
    if not is_local(folder):
        return "it is no folder here, so there is no adapter/ beside its weights"
    if not (adapter / ADAPTER_FILE).is_file():
        return "it has no adapter/ folder: it was not trained with model.lora_rank above 0"
    if not (adapter / "adapter_model.safetensors").is_file():
        return "its adapter/ has no adapter_model.safetensors"
    if not (adapter.parent / HEAD_FILE).is_file():
        return f"it has no {HEAD_FILE}, so there is no head that belongs to the adapter"
    about = read_json(adapter / ADAPTER_FILE)
    if about.get("peft_type") != "LORA" or about.get("use_dora") or about.get("modules_to_save"):
        return f"its adapter is a {about.get('peft_type')} that is more than W + B A"
    own = load_config(folder)
    if own.model_type != base.model_type:
        return f"it is a {own.model_type}, the policy a {base.model_type}"
    theirs, ours = own.get_text_config(), base.get_text_config()
    for key in ("hidden_size", "vocab_size"):
        if getattr(theirs, key) != getattr(ours, key):
            return f"its {key} is {getattr(theirs, key)}, the policy's {getattr(ours, key)}"
    if theirs.num_hidden_layers > ours.num_hidden_layers:
        return f"it has {theirs.num_hidden_layers} blocks, the policy {ours.num_hidden_layers}"
    return None


@dataclass(frozen=True)
class _Fit:
    """Of a reward model to the base: why it cannot stand on it, or what is not quite the same if it does."""

    obstacle: str | None = None
    caution: str | None = None


def _fit(trunk: Trunk, folder: str, cfg: ModelSettings, device: str) -> _Fit:
    """The base is not quantised yet; device: where it will be."""
    obstacle = folder_obstacle(folder, trunk.model.config)
    if obstacle is not None:
        return _Fit(obstacle)
    head = saved_head(folder)
    assert head is not None, "the folder has a head file"
    if head.kind != "reward":
        return _Fit(f"it is a {head.kind} model")
    backbone = _cut(trunk, folder)
    try:
        _adapter_of(backbone, folder, trained=False)
    except (RuntimeError, ValueError) as problem:  # sizes that differ, layers that are not there
        why = str(problem).strip().splitlines()[-1].strip()
        return _Fit(f"its adapter does not fit the policy's matrices: {why}")
    return _compared(backbone, folder, cfg, device)


def _reward(trunk: Trunk, folder: str, tokenizer: PreTrainedTokenizerBase | None) -> ScalarModel:
    """The reward model of a folder that fits, on the base."""
    head = saved_head(folder)
    assert head is not None, "the folder has a head file"
    backbone = _cut(trunk, folder)
    adapted = _adapter_of(backbone, folder, trained=False)
    own = Trunk(backbone, trunk.layout, trunk.causal)
    made = ScalarModel(own, head.layers, "reward", head.pooling, head.activation, tokenizer, adapted)
    return made.requires_grad_(False)


def _cut(trunk: Trunk, folder: str) -> PreTrainedModel:
    """Modules for a folder's adapter, of as many of the base's lowest blocks as it has."""
    backbone = twin(trunk.model)
    blocks = int(load_config(folder).get_text_config().num_hidden_layers)
    if blocks < int(backbone.config.num_hidden_layers):
        keep_lowest(backbone, blocks)
    return backbone


def _adapter_of(backbone: PreTrainedModel, folder: str, *, trained: bool) -> PeftModel:
    """Put the adapter of a folder on `backbone`, in place."""
    with torch.random.fork_rng(devices=[]):
        return PeftModel.from_pretrained(backbone, str(Path(folder).expanduser() / ADAPTER), is_trainable=trained)


@torch.no_grad()
def _compared(backbone: PreTrainedModel, folder: str, cfg: ModelSettings, device: str) -> _Fit:
    """Whether the folder's merged weights are base + adapter.

    Compared is every weight: one without an adapter to the bit, one with an adapter up to rounding.  A model that was
    trained in bfloat16 has merged weights of a base that is rounded to it, one that was trained on a quantised base
    those of that.
    """
    stored = StoredWeights.of(folder, weight_files(folder), backbone.base_model_prefix)
    dtypes = (torch.float32, torch.bfloat16)
    if cfg.quantize != "none":
        packings = [_difference(backbone, stored, _Rounding(dtype, device)) for dtype in dtypes]
        if None in packings:
            return _Fit()
    found = [_difference(backbone, stored, _Rounding(dtype)) for dtype in dtypes]
    if None not in found:
        return _Fit(f"it was trained on another base: {found[0]}")
    if cfg.quantize == "none":
        return _Fit()
    return _Fit(
        caution="it was trained on the base before it was quantised, so its scores differ a little here; train it with "
        "model.quantize too, or set reward.shared_base to false"
    )


@dataclass(frozen=True)
class _Rounding:
    """How a base's weights were rounded before something was trained on them.

    packed_on  the device that quantised those with an adapter; None: nothing was.
    """

    dtype: torch.dtype = torch.float32
    packed_on: str | None = None

    def __call__(self, weight: Tensor, with_adapter: bool) -> Tensor:
        if with_adapter and self.packed_on is not None:
            return rounded(weight.float().to(self.packed_on)).to(weight.device)
        return weight.to(self.dtype).float()


def _difference(backbone: PreTrainedModel, stored: StoredWeights, rounding: _Rounding) -> str | None:
    """The first weight in which a folder differs from the adapted `backbone`, its base rounded."""
    weights = dict(backbone.named_parameters())

    def read(name: str) -> Tensor:
        weight = weights[name].detach()
        return weight if ".lora_" in name else rounding(weight, name.endswith(".base_layer.weight"))

    for name, expected in merging(backbone, weights, read):
        if not stored.has(name):
            return f"it has no {name}"
        try:
            saved = stored.read(name, expected).to(expected.device)
        except ModelError as problem:
            return problem.what
        bound = CLOSE * float(expected.abs().max()) if name not in weights else 0.0
        gap = float((saved - expected).abs().max())
        if not gap <= bound:
            return f"{name} differs from the policy's{' plus the adapter' if bound else ''} by up to {gap:.2g}"
    return None
