"""Models whose weights are never whole on any rank: built without storage, sharded, then filled part by part.

A rank reads from the safetensors files no more than its own slice of every weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tutelage.errors import ModelError
from tutelage.models.paths import loading
from tutelage.models.sharding import local, place, placed

Read = Callable[[str, Tensor], Tensor]
"""(name, a weight without storage, placed) -> this rank's part of it."""


def skeleton(auto: Any, config: PreTrainedConfig, path: str) -> PreTrainedModel:
    """The float32 model of a configuration without storage. Raises ModelError where transformers cannot build it."""
    with loading(path), torch.device("meta"):
        model = auto.from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False)
    assert isinstance(model, PreTrainedModel)
    return model


@contextmanager
def on_the_host(model: nn.Module) -> Iterator[None]:
    """Inside, weights without storage are seen as the host's (one number, repeated).

    An adapter is made on the device of the weight it belongs to; so it gets its values, as beside a loaded weight.
    """

    def exchange(make: Callable[[nn.Parameter], Tensor], which: Callable[[nn.Parameter], bool]) -> None:
        made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for owner in model.modules():
            for leaf, old in list(owner.named_parameters(recurse=False)):
                if which(old):
                    if id(old) not in made:
                        made[id(old)] = (nn.Parameter(make(old), requires_grad=old.requires_grad), old)
                    setattr(owner, leaf, made[id(old)][0])

    one = torch.zeros(1)
    exchange(lambda p: one.to(p.dtype).as_strided(p.shape, (0,) * p.ndim), lambda p: p.is_meta)
    try:
        yield
    finally:
        repeated = lambda p: p.numel() > 1 and not any(p.stride())  # noqa: E731
        exchange(lambda p: torch.empty_like(p, device="meta", memory_format=torch.contiguous_format), repeated)


def fill(module: nn.Module, read: Read) -> None:
    """Give every parameter without storage this rank's part, in place; tied ones stay tied."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old one too: its id must stay its own
    for owner in module.modules():
        for leaf, old in list(owner.named_parameters(recurse=False)):
            if not local(old).is_meta:
                continue
            if id(old) not in made:
                part = read(names[id(old)], old)
                made[id(old)] = (nn.Parameter(placed(part, old), requires_grad=old.requires_grad), old)
            setattr(owner, leaf, made[id(old)][0])


def fill_buffers(model: PreTrainedModel, device: torch.device, path: str, stored: StoredWeights | None) -> None:
    """Give every buffer without storage its values: from the files, else as the architecture makes them.

    Raises ModelError for a buffer that neither gives.
    """
    for name, owner in model.named_modules():
        empty = {leaf: b for leaf, b in owner.named_buffers(recurse=False) if b.is_meta}
        for leaf, buffer in empty.items():
            made = torch.empty_like(buffer, device="cpu")
            mark = float("nan") if made.is_floating_point() else _mark(made.dtype)
            owner._buffers[leaf] = made.fill_(mark)
        if not empty:
            continue
        model._init_weights(owner)
        for leaf in empty:
            full = f"{name}.{leaf}" if name else leaf
            found = owner._buffers[leaf]
            assert found is not None
            if stored is not None and stored.has(full) and leaf not in owner._non_persistent_buffers_set:
                found = stored.read(full, found)
            elif bool(found.isnan().any() if found.is_floating_point() else (found == _mark(found.dtype)).any()):
                raise ModelError(
                    f"the buffer {full} of {type(model).__name__} is neither in {path} nor made by the architecture",
                    fix="load the model whole on every rank (a layout with replicas only)",
                )
            owner._buffers[leaf] = found.to(device)


def _mark(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def hollow(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A frozen model of the same architecture and buffers, whose weights have no storage."""
    with torch.device("meta"):
        copied = type(model)(copy.deepcopy(model.config)).requires_grad_(False)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        copied.get_submodule(owner)._buffers[leaf] = buffer.clone()
    return copied.eval()


@dataclass(eq=False)
class StoredWeights:
    """The weights of a model folder, by the names that a model has for them.

    files   key in the files -> its file.
    prefix  what names begin with in the files of a model with a head, and do not in those of the bare one.
    """

    path: str
    files: dict[str, Path]
    prefix: str

    @classmethod
    def of(cls, path: str, files: list[Path], prefix: str) -> StoredWeights:
        """Raises ModelError for a file that is damaged."""
        held: dict[str, Path] = {}
        for file in files:
            with loading(path), _reading(file), safe_open(str(file), framework="pt") as tensors:
                held.update(dict.fromkeys(tensors.keys(), file))
        return cls(path, held, f"{prefix}.")

    def _key(self, name: str) -> str | None:
        older = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for candidate in (name, older):
            for key in (candidate, f"{self.prefix}{candidate}", candidate.removeprefix(self.prefix)):
                if key in self.files:
                    return key
        return None

    def has(self, name: str) -> bool:
        return self._key(name) is not None

    def read(self, name: str, like: Tensor) -> Tensor:
        """This rank's part, as `like` is placed, in its type, in the host's memory.

        Raises ModelError for another shape, a damaged file, and values that are not finite.
        """
        key = self._key(name)
        assert key is not None, name
        file = self.files[key]
        shape, offset = place(like)
        with _reading(file), safe_open(str(file), framework="pt") as tensors:
            held = tensors.get_slice(key)
            if tuple(held.get_shape()) != tuple(like.shape):
                raise ModelError(
                    f"{self.path} has weights of another shape: {key} is {tuple(held.get_shape())}, "
                    f"the model has {tuple(like.shape)}",
                    fix="give a complete model folder of this kind",
                )
            if not shape:
                part = tensors.get_tensor(key)
            elif 0 in shape:
                part = torch.empty(shape)
            else:
                part = held[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        part = part.to(like.dtype, copy=True)
        if part.is_floating_point() and not bool(part.isfinite().all()):
            raise ModelError(
                f"{self.path} has weights that are NaN or infinite: {key}",
                fix="train it again with a lower optim.lr, or give an earlier checkpoint",
            )
        return part


class _reading:  # noqa: N801 - a context manager
    """What safetensors raises becomes a ModelError that names the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        from safetensors import SafetensorError

        if isinstance(error, SafetensorError | OSError) and not isinstance(error, ModelError):
            raise ModelError(f"{self.file} cannot be read: {error}", fix="restore the model folder") from error
