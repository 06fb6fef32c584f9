"""A causal language model as an engine sees it: trunk, output head, tokenizer, adapter, master weights.

Shapes: n tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tutelage.errors import ModelError
from tutelage.models.computation import Computation
from tutelage.models.export import Writers, named_weights, of_all_stages, write_folder, write_shards
from tutelage.models.lora import merged_weights, plain_copy, save_adapter
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
        self.logits = logits_function(model)
        self.vocabulary: VocabularyParallel | None = None

    @property
    def module(self) -> PreTrainedModel:
        return self.model

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
        alone in `adapter/`. The running model is left as it is."""
        weights = self.masters.full_precision()
        if self.adapted is not None:
            save_adapter(self.adapted, weights, folder / "adapter")
            weights = merged_weights(self.model, weights)
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


def logits_function(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """hidden (n, H) -> logits (n, V) of the architecture: its output layer, then its scale, then its soft cap.

    Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Gemma 2 maps logits to
    c tanh(logits / c) with c = `final_logit_softcapping`.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output layer", fix="use a causal language model")
    config = model.config
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    cap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden_nH: Tensor) -> Tensor:
        out_nV = head(hidden_nH)
        if scale is not None:
            out_nV = out_nV * scale
        if divisor is not None:
            out_nV = out_nV / divisor
        return out_nV if cap is None else cap * torch.tanh(out_nV / cap)

    return logits
