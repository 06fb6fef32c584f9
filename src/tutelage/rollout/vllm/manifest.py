"""Which weights a model has, in its checkpoint's names, and a check of every publication against that list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tutelage.errors import RolloutError, closest

Named = Iterable[tuple[str, Tensor]]
"""(name in the checkpoint, whole tensor), one after another."""


@dataclass(frozen=True)
class Manifest:
    """shapes of every parameter by name; tied: (embedding, output head) where they are one parameter."""

    shapes: dict[str, tuple[int, ...]]
    tied: tuple[str, str] | None

    @classmethod
    def of(cls, config: Any) -> Manifest:
        """From a transformers configuration: the architecture is built without memory for its weights."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = None
        if embedding is not None and head is not None and embedding.weight is head.weight:
            first, second = (n for n, p in parameters.items() if p is embedding.weight)
            tied = (first, second)
        return cls({name: tuple(p.shape) for name, p in parameters.items()}, tied)

    def checked(self, named: Named) -> Iterator[tuple[str, Tensor]]:
        """The same weights, each looked at, with the head added where it is tied to the embedding.

        A tied head must be sent too: vLLM holds another copy of it that would stay old.
        Raises RolloutError for an unknown name, another shape, a name that comes twice, and names that never come.
        """
        missing = set(self.shapes)
        for name, tensor in named:
            self._require(name, tensor, missing)
            if self.tied is not None and name in self.tied:
                if self.tied[0] in missing and self.tied[1] in missing:
                    missing -= set(self.tied)
                    yield self.tied[0], tensor
                    yield self.tied[1], tensor
                continue
            missing.discard(name)
            yield name, tensor
        if missing:
            raise RolloutError(
                f"{len(missing)} of the engine's {len(self.shapes)} weights were not published, such as "
                f"{min(missing)!r}",
                fix="publish every parameter of the policy by its name in a checkpoint; a LoRA policy merged",
            )

    def _require(self, name: str, tensor: Tensor, missing: set[str]) -> None:
        if name not in self.shapes:
            raise RolloutError(
                f"the engine's model has no weight {name!r}.{closest(name, self.shapes)}",
                fix="publish the policy under its names in a checkpoint; a LoRA policy merged",
            )
        if tuple(tensor.shape) != self.shapes[name]:
            raise RolloutError(
                f"{name} is {tuple(tensor.shape)} in the policy and {self.shapes[name]} in the engine",
                fix="start the engine from the policy's own folder (vocabulary and architecture must be the same)",
            )
        if name not in missing and not (self.tied and name in self.tied):
            raise RolloutError(f"{name} was published twice", fix="send each parameter once")


def buckets(named: Named, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups of whole tensors of at most `bucket_bytes`; a larger tensor is alone in its group."""
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        nbytes = tensor.numel() * tensor.element_size()
        if group and size + nbytes > bucket_bytes:
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += nbytes
    if group:
        yield group
