"""LoRA (Hu et al. 2021, arXiv:2106.09685) through peft: W x + (alpha / rank) B A x on every linear layer.

The base weights stay frozen, so the policy as it was passed in is the same model with the adapter off.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tutelage.errors import ModelError


def attach(model: PreTrainedModel, rank: int, alpha: float, seed: int = 0) -> PeftModel:
    """Put adapters on all linear layers of `model` but its output head, in place; everything else is frozen.

    B starts at 0, so the adapted model equals the base; A depends on `seed` alone. Raises ModelError where the model
    has no linear layer.
    """
    head = model.get_output_embeddings()
    targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    if not targets:
        raise ModelError(f"{type(model).__name__} has no linear layers for LoRA", fix="set model.lora_rank to 0")
    transposed = any(isinstance(m, Conv1D) for m in model.modules())
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=targets,
        bias="none",
        fan_in_fan_out=transposed,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)
    return adapted


@contextlib.contextmanager
def adapter_off(adapted: PeftModel | None) -> Iterator[None]:
    """Inside, the model computes exactly what its base does. Raises ModelError for a model without an adapter."""
    if adapted is None:
        raise ModelError(
            "the model has no adapter that could be switched off",
            fix="take a snapshot of the policy for the reference, or set model.lora_rank above 0",
        )
    # peft switches gradients on for every adapter when it comes back, also for those that were frozen.
    trained = {parameter: parameter.requires_grad for parameter in adapted.parameters()}
    try:
        with adapted.disable_adapter():
            yield
    finally:
        for parameter, flag in trained.items():
            parameter.requires_grad_(flag)


def merged_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` (every parameter of the adapted `model`, by name) as those of the plain architecture, B A added in.

    Computed from what is passed, in its precision; the model is left as it is.
    """
    return dict(merging(model, weights, weights.__getitem__))


def merging(model: nn.Module, names: Iterable[str], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`merged_weights` one at a time: `read` is asked for a weight when it is needed, and for its adapter after it.

    Raises ModelError for a weight that is not of its adapter's shape, such as a packed one.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    for name in names:
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        weight = read(name)
        if leaf == "weight" and owner:
            delta = _delta(owner, layers[owner], read)
            if weight.shape != delta.shape:
                raise ModelError(
                    f"{name} has shape {tuple(weight.shape)}, its adapter {tuple(delta.shape)}",
                    fix="merge what MasterWeights.full_precision gives: a quantised weight is a matrix there",
                )
            weight = weight + delta.to(weight.dtype)
        yield plain_name(name), weight


def plain_name(name: str) -> str:
    """Of an adapted model's weight in the plain architecture."""
    return name.replace(".base_layer.", ".")


def adapter_name(name: str) -> str | None:
    """Of an adapter's weight in an adapter folder, as peft writes it; None for a weight of the base."""
    return f"base_model.model.{name.replace('.default.', '.')}" if ".lora_" in name else None


def _delta(name: str, layer: LoraLayer, read: Callable[[str], Tensor]) -> Tensor:
    down, up = read(f"{name}.lora_A.default.weight"), read(f"{name}.lora_B.default.weight")
    delta = layer.scaling["default"] * (up @ down)
    return delta.T if isinstance(layer.get_base_layer(), Conv1D) else delta


def plain_copy(model: PreTrainedModel, adapted: PeftModel | None, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A new, trainable float32 model of the plain architecture with `weights` (by the names of `model`), merged."""
    with torch.random.fork_rng(devices=[]):
        fresh = type(model)(copy.deepcopy(model.config)).float()
    state = dict(weights) if adapted is None else merged_weights(model, weights)
    state |= {name: buffer for name, buffer in model.state_dict().items() if name in dict(model.named_buffers())}
    fresh.load_state_dict(state)
    return fresh.to(next(model.parameters()).device)


def save_adapter(adapted: PeftModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """The adapter alone, as peft writes it (safetensors), from `weights` by the names of the adapted model."""
    state = {f"base_model.model.{name}": weight for name, weight in weights.items()}
    adapted.save_pretrained(str(folder), state_dict=state)


def write_adapter(adapted: PeftModel, saved: Mapping[str, Tensor], folder: Path) -> None:
    """The adapter alone, as peft writes it, from tensors under the names that peft saves them by."""
    folder.mkdir(parents=True, exist_ok=True)
    adapted.peft_config["default"].save_pretrained(str(folder))
    save_file({name: weight.contiguous() for name, weight in saved.items()}, str(folder / "adapter_model.safetensors"))


def merge_folder(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """`base` with the adapter of `folder` merged in, all of it trainable. Raises ModelError for a pickled adapter."""
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(
            f"{folder} has no adapter_model.safetensors; pickled adapters (.bin) are never opened",
            fix="load it once in peft and write it again with save_pretrained",
        )
    merged = PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    assert isinstance(merged, PreTrainedModel)
    return merged.requires_grad_(True)
