"""A causal language model as an engine sees it: trunk, output head, tokenizer, adapter, master weights.

Shapes: n tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tutelage.errors import ModelError
from tutelage.models.computation import Computation
from tutelage.models.export import (
    Writers,
    adapter_weights,
    named_weights,
    of_all_stages,
    write_folder,
    write_shards,
)
from tutelage.models.lora import plain_copy, save_adapter
from tutelage.models.meta import fill, hollow
from tutelage.models.parallel.vocabulary import VocabularyParallel
from tutelage.models.precision import MasterWeights
from tutelage.models.sharding import Sharding, local
from tutelage.models.trunk import Trunk
from tutelage.models.weights import blocks_of


class LanguageModel:
    """model: the transformers model (with LoRA layers in it where `adapted` is not None), in its compute precision.

    root      what an engine's computations run inside of.
    sharding  how the weights are spread over ranks; None: they are whole on this one.
    value_head    a critic on this trunk (`add_value_head`); None: this is a policy alone.
    detach_trunk  the critic's loss stops at the head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        trunk: Trunk,
        tokenizer: PreTrainedTokenizerBase,
        masters: MasterWeights,
        adapted: PeftModel | None = None,
    ) -> None:
        self.model = model
        self.root = Computation(model)
        self.sharding: Sharding | None = None
        self.trunk = trunk
        self.tokenizer = tokenizer
        self.masters = masters
        self.adapted = adapted
        self.logits: Callable[[Tensor], Tensor] = logits_function(model)
        self.vocabulary: VocabularyParallel | None = None
        self.value_head: nn.Linear | None = None
        self.detach_trunk = False

    @property
    def module(self) -> PreTrainedModel:
        return self.model

    def add_value_head(self, head: nn.Linear, *, detach: bool = False) -> None:
        """A critic on the trunk, trained with it: `head` (H -> 1), in float32 and outside `module`, so that adapters,
        snapshots, published weights and model folders are without it.

        Raises ModelError for weights that are spread over ranks.
        """
        if self.sharding is not None:
            raise ModelError(
                "the policy is spread over ranks, and a value head on its trunk is not", fix="set critic.trunk to own"
            )
        self.value_head, self.detach_trunk = head.to(self.trunk.device), detach
        self.masters.add("value_head", self.value_head)

    def values(self, hidden_nH: Tensor) -> Tensor:
        """(n,) float32: the value head on every hidden state.  Raises ModelError where there is none."""
        if self.value_head is None:
            raise ModelError("this policy has no value head", fix="ask the critic, or set critic.trunk to actor")
        out_n1: Tensor = self.value_head((hidden_nH.detach() if self.detach_trunk else hidden_nH).float())
        return out_n1.squeeze(-1)

    def snapshot(self) -> LanguageModel:
        """A frozen copy that computes exactly what the model computes at this moment.

        Raises ModelError with LoRA: there the same model with its adapter off is the base, and needs no copy.
        """
        if self.adapted is not None:
            raise ModelError("a policy with LoRA needs no snapshot", fix="run it with the adapter off")
        if self.sharding is None:
            model = copy.deepcopy(self.model).requires_grad_(False)
            model.gradient_checkpointing_disable()
        else:
            model = hollow(self.model, self.sharding.dtype)
        trunk = Trunk(backbone_of(model), self.trunk.layout, self.trunk.causal, self.trunk.tokens)
        copied = LanguageModel(model.eval(), trunk, self.tokenizer, MasterWeights(model, torch.float32))
        if self.sharding is not None:
            copied.sharding = self.sharding
            self.sharding.spread(copied, blocks_of(trunk.model))
            weights, dtype = dict(self.model.named_parameters()), self.sharding.dtype
            fill(model, lambda name, _: local(weights[name]).detach().to(dtype, copy=True))
            copied.masters = MasterWeights(model, torch.float32)
        return copied

    def plain_trunk(self) -> Trunk:
        """A float32 copy of the trunk, an adapter merged in."""
        prefix = f"{self.model.base_model_prefix}."
        every = self.masters.full_precision()
        weights = {name.removeprefix(prefix): w for name, w in every.items() if name.startswith(prefix)}
        copied = plain_copy(self.trunk.model, self.adapted, weights)
        return Trunk(copied, self.trunk.layout, self.trunk.causal)

    def save_pretrained(self, folder: Path) -> None:
        """An ordinary Hugging Face folder in float32, tokenizer included; with LoRA the merged weights, and the adapter
        alone in `adapter/`. The running model is left as it is; an accelerator holds one merged weight at a time."""
        if self.adapted is not None:
            save_adapter(self.adapted, adapter_weights(self.model, self.masters), folder / "adapter")
        every = named_weights(self.model, self.masters, adapter_only=False, tied=False)
        weights = {name: weight.cpu() for name, weight in every}
        write_folder(self.model, weights, self.tokenizer, folder)

    def named_weights(self, adapter_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole float32 tensor), tied weights under each name; collective where sharded."""
        weights = named_weights(self.model, self.masters, adapter_only=adapter_only, tied=True)
        return of_all_stages(weights, None if self.sharding is None else self.sharding.stages)

    def save_sharded(self, folder: Path, writers: Writers) -> None:
        """`save_pretrained` by all ranks together, each writing some of the files."""
        stages = None if self.sharding is None else self.sharding.stages
        write_shards(self.model, self.masters, self.adapted, self.tokenizer, folder, writers, stages=stages)


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """The transformer below the output head. Raises ModelError where the architecture does not say which it is."""
    backbone = model.base_model
    if backbone is model or not isinstance(backbone, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} has no backbone below its head", fix="use a plain decoder model")
    return backbone


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """hidden (n, H) -> logits (n, V) of the architecture: its output layer, then its scale, then its soft cap.

    Cohere multiplies by `scale`, Granite divides by `divisor`, Gemma 2 maps logits to c tanh(logits / c), c = `cap`.
    """

    head: nn.Module
    scale: float | None = None
    divisor: float | None = None
    cap: float | None = None

    def __call__(self, hidden_nH: Tensor) -> Tensor:
        out_nV: Tensor = self.head(hidden_nH)
        if self.scale is not None:
            out_nV = out_nV * self.scale
        if self.divisor is not None:
            out_nV = out_nV / self.divisor
        return out_nV if self.cap is None else self.cap * torch.tanh(out_nV / self.cap)

    def linear(self) -> tuple[Tensor, Tensor | None] | None:
        """As `math.linear_head.LinearHead`.

        None with a scale or a cap, with a layer of another class or with a hook, which would be passed over, and while
        its weights are not whole on this rank.
        """
        head = self.head
        if (self.scale, self.divisor, self.cap) != (None, None, None) or type(head) is not nn.Linear:
            return None
        hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
        if any(hooks) or "forward" in vars(head):
            return None
        tensors = [head.weight] if head.bias is None else [head.weight, head.bias]
        return (head.weight, head.bias) if all(type(x) in (Tensor, nn.Parameter) for x in tensors) else None


def logits_function(model: PreTrainedModel) -> OutputLayer:
    """The output layer of the architecture, with what its configuration puts after it.

    Raises ModelError where there is none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output layer", fix="use a causal language model")
    config = model.config
    return OutputLayer(
        head,
        getattr(config, "logit_scale", None),
        getattr(config, "logits_scaling", None),
        getattr(config, "final_logit_softcapping", None),
    )
