"""A causal language model as an engine sees it: trunk, output head, tokenizer, adapter, master weights.

Shapes: n tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tutelage.errors import ModelError
from tutelage.models.export import write_folder
from tutelage.models.lora import merged_weights, plain_copy, save_adapter
from tutelage.models.precision import MasterWeights
from tutelage.models.trunk import Trunk


class LanguageModel:
    """model: the transformers model (with LoRA layers in it where `adapted` is not None), in its compute precision."""

    def __init__(
        self,
        model: PreTrainedModel,
        trunk: Trunk,
        tokenizer: PreTrainedTokenizerBase,
        masters: MasterWeights,
        adapted: PeftModel | None = None,
    ) -> None:
        self.model = model
        self.trunk = trunk
        self.tokenizer = tokenizer
        self.masters = masters
        self.adapted = adapted
        self.logits = logits_function(model)

    @property
    def module(self) -> PreTrainedModel:
        return self.model

    def snapshot(self) -> LanguageModel:
        """A frozen copy that computes exactly what the model computes at this moment.

        Raises ModelError with LoRA: there the same model with its adapter off is the base, and needs no copy.
        """
        if self.adapted is not None:
            raise ModelError("a policy with LoRA needs no snapshot", fix="run it with the adapter off")
        model = copy.deepcopy(self.model).requires_grad_(False)
        model.gradient_checkpointing_disable()
        trunk = Trunk(backbone_of(model), self.trunk.layout, self.trunk.causal)
        frozen = MasterWeights(model, torch.float32)
        return LanguageModel(model.eval(), trunk, self.tokenizer, frozen)

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
