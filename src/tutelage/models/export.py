"""Model folders as transformers writes them, and weights by the names in them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tutelage.models.lora import adapter_name, merging, plain_name, save_adapter
from tutelage.models.parallel.stages import Stages
from tutelage.models.paths import quiet
from tutelage.models.precision import MasterWeights
from tutelage.models.quantize import dense_shape
from tutelage.models.sharding import whole

FILE_BYTES = 4 << 30
"""Of one file of weights, at most, where a single tensor is not larger."""


class Writers(Protocol):
    """The ranks that write a folder together."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def agree(self, error: Exception | None) -> None: ...


def write_folder(
    model: PreTrainedModel, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """config.json, safetensors of `weights` (float32, every parameter by name) with the model's persistent buffers, and
    the tokenizer.  `model` gives the architecture and is not changed."""
    with quiet():
        model.save_pretrained(folder, state_dict={**_persistent_buffers(model), **weights})
    _write_config(model, folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def _write_config(model: PreTrainedModel, folder: Path) -> None:
    # transformers notes the precision of the running copy; the weights were written in float32.
    dtype = model.config.dtype
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    model.config.dtype = dtype


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raises OSError where it cannot be written: the tokenizers library raises a bare Exception."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(f"the tokenizer cannot be written to {folder}: {error}") from error


def _persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    kept = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


# ---- weights one at a time ----


def named_weights(
    module: nn.Module, masters: MasterWeights, *, adapter_only: bool, tied: bool, prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """(name in a model folder, whole float32 tensor) of every parameter of `module`, LoRA merged, or the adapter alone.

    tied: a parameter with two names comes twice.  prefix: taken off the names.  Collective where weights are sharded.
    """
    parameters = dict(module.named_parameters(remove_duplicate=not tied))
    first = {id(parameter): name for name, parameter in module.named_parameters()}

    def read(name: str) -> Tensor:
        return whole(masters.wide(first[id(parameters[name])], parameters[name]))

    if adapter_only:
        for name in parameters:
            if (saved := adapter_name(name.removeprefix(prefix))) is not None:
                yield saved, read(name)
        return
    for name, weight in merging(module, parameters, read):
        yield name.removeprefix(prefix), weight


def adapter_weights(module: nn.Module, masters: MasterWeights, prefix: str = "") -> dict[str, Tensor]:
    """The adapters' weights alone, in float32, whole on this rank, by their names in the model."""
    named = ((name, p) for name, p in module.named_parameters() if ".lora_" in name and name.startswith(prefix))
    return {name.removeprefix(prefix): masters.wide(name, parameter) for name, parameter in named}


def of_all_stages(weights: Iterator[tuple[str, Tensor]], stages: Stages | None) -> Iterator[tuple[str, Tensor]]:
    """The weights of one pipeline stage -> those of all stages, on each; collective."""
    return weights if stages is None else stages.stream(weights)


def bucketed(weights: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of at most `limit` bytes together; a larger tensor is alone."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > limit:
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held


# ---- a folder written by several ranks ----


@dataclass(eq=False)
class _File:
    name: str
    owner: int
    expected: set[str]
    held: dict[str, Tensor] = field(default_factory=dict)


def write_shards(
    model: PreTrainedModel,
    masters: MasterWeights,
    adapted: PeftModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    writers: Writers,
    *,
    holder: nn.Module | None = None,
    prefix: str = "",
    besides: Callable[[], None] = lambda: None,
    file_bytes: int = FILE_BYTES,
    stages: Stages | None = None,
) -> None:
    """The folder of `write_folder`, LoRA merged, its weights in several files and an index; the adapter in `adapter/`.

    Collective.  Every tensor is whole on every rank for a moment; a rank keeps those of the file it writes.
    holder   the module with all parameters, if that is not `model`; prefix: of the model's names in it.
    besides  called on rank 0, after the folder exists.
    stages   the pipeline stages that the blocks are on.
    Raises OSError, on every rank, where something cannot be written.
    """
    module = holder if holder is not None else model
    buffers = dict(of_all_stages(iter(_persistent_buffers(model).items()), stages))
    sizes = {name: buffer.nbytes for name, buffer in buffers.items()}
    for name, parameter in module.named_parameters():
        if ".lora_" not in name:
            sizes[plain_name(name).removeprefix(prefix)] = 4 * math.prod(dense_shape(parameter))
    sizes = sizes if stages is None else stages.union(sizes)
    files = _plan(sizes, min(file_bytes, math.ceil(sum(sizes.values()) / writers.world)), writers.world)
    where = {name: file for file in files for name in file.expected}
    failed = _Failures()
    failed.attempt(lambda: folder.mkdir(parents=True, exist_ok=True))
    every = of_all_stages(named_weights(module, masters, adapter_only=False, tied=False, prefix=prefix), stages)
    for stream in (iter(buffers.items()), every):
        for name, weight in stream:
            file = where[name]
            if file.owner == writers.rank:
                file.held[name] = weight.detach().cpu().clone(memory_format=torch.contiguous_format)
                if file.held.keys() == file.expected:
                    failed.attempt(partial(save_file, file.held, folder / file.name, {"format": "pt"}))
                    file.held = {}
    lora = (
        (name.removeprefix(prefix), whole(masters.wide(name, parameter)))
        for name, parameter in module.named_parameters()
        if ".lora_" in name
    )
    adapter = dict(of_all_stages(lora, stages))
    if writers.rank == 0:
        if len(files) > 1:
            failed.attempt(lambda: _write_index(files, sizes, folder))
        failed.attempt(lambda: _write_about(model, tokenizer, folder))
        failed.attempt(besides)
        if adapted is not None:
            failed.attempt(lambda: save_adapter(adapted, adapter, folder / "adapter"))
            if stages is not None:  # peft writes those of the blocks that are here
                every_adapter = {saved: w.contiguous() for n, w in adapter.items() if (saved := adapter_name(n))}
                adapter_file = folder / "adapter" / "adapter_model.safetensors"
                failed.attempt(lambda: save_file(every_adapter, adapter_file, {"format": "pt"}))
    writers.agree(failed.first)


class _Failures:
    """The first error of several attempts: the others' collectives must go on."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.first = self.first or error


def _plan(sizes: Mapping[str, int], limit: int, world: int) -> list[_File]:
    """Files of about `limit` bytes in the order of the names, dealt to the ranks in turn."""
    groups: list[set[str]] = []
    size = 0
    for name, count in sizes.items():
        if not groups or size + count > limit:
            groups.append(set())
            size = 0
        groups[-1].add(name)
        size += count
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        names = ["model.safetensors"]
    return [_File(name, i % world, group) for i, (name, group) in enumerate(zip(names, groups, strict=True))]


def _write_index(files: list[_File], sizes: Mapping[str, int], folder: Path) -> None:
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: file.name for file in files for name in sorted(file.expected)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_about(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """What lies beside the weights."""
    model.config.architectures = [type(model).__name__]
    _write_config(model, folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
