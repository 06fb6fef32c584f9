"""Tensor parallelism: the matrices of every block cut over ranks (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).

A column-wise layer holds rows of its weight (out, in) and computes a slice of its outputs; the row-wise layer after it
takes that slice and the ranks' results are summed.  So a rank has whole attention heads and a slice of the MLP, and two
all-reduces a block are all that travels.  The embedding and the output layer are cut along the vocabulary where the
ranks divide it; norms and scalar heads are whole on every rank.

Cut weights are DTensors on the mesh that was given, others stay ordinary tensors.  All tensor peers see the same rows,
compute the same loss and end with the same gradient of every whole weight and the gradient of their own slice of every
cut one: nothing is divided and nothing is summed over this axis.  `fully_shard` on another dimension of the same mesh
comes after this, master weights too.

LoRA: beside a column-wise layer B is cut column-wise and A is whole; beside a row-wise one A is cut row-wise and B is
whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.func import functional_call

from tutelage.errors import ModelError, closest
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel
from tutelage.models.parallel.collectives import copied
from tutelage.models.parallel.tokens import divisors, sequence_obstacle
from tutelage.models.parallel.vocabulary import VocabularyParallel
from tutelage.models.trunk import embedding_matrix
from tutelage.models.weights import blocks_of

Plan = dict[str, str]
"""Module of a block -> "column", "row", or "norm": a norm over each head, which the rank applies to its own heads."""

_ATTENTION: Plan = {
    "self_attn.q_proj": "column",
    "self_attn.k_proj": "column",
    "self_attn.v_proj": "column",
    "self_attn.o_proj": "row",
}
_GATED: Plan = {**_ATTENTION, "mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row"}
_NORMED: Plan = {**_GATED, "self_attn.q_norm": "norm", "self_attn.k_norm": "norm"}

PLANS: dict[str, Plan] = {
    "gemma": _GATED,
    "gemma2": _GATED,
    "granite": _GATED,
    "llama": _GATED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _NORMED,
    "smollm3": _GATED,
    "starcoder2": {**_ATTENTION, "mlp.c_fc": "column", "mlp.c_proj": "row"},
}
"""By `model_type` of the configuration."""

REFUSED = {
    "gpt2": "its query, key and value are one matrix, of which a slice holds no whole heads",
    "gpt_neox": "its query, key and value are one matrix, of which a slice holds no whole heads",
    "phi3": "its query, key and value are one matrix, of which a slice holds no whole heads",
}


def tensor_obstacle(config: Any, size: int, sequence: int = 1) -> str | None:
    """Why a model of this configuration cannot be cut over `size` tensor ranks, or None where it can.

    Reads the configuration alone. sequence: Ulysses ranks that cut the heads of each tensor rank once more.
    """
    if size == 1:
        return sequence_obstacle(config, sequence)
    kind = config.model_type
    if kind in REFUSED:
        return f"{kind} cannot be cut over tensor ranks: {REFUSED[kind]}"
    if kind not in PLANS:
        return f"{kind} has no tensor-parallel plan; {', '.join(sorted(PLANS))} have one.{closest(kind, PLANS)}"
    heads = int(config.num_attention_heads)
    sizes = {
        "attention heads": heads,
        "key/value heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "intermediate size": int(config.intermediate_size),
    }
    odd = [f"{number} ({name})" for name, number in sizes.items() if number % size]
    if odd:
        common = divisors(math.gcd(*sizes.values()))
        return f"{size} tensor ranks do not divide {' and '.join(odd)} of this {kind} model; {common} would"
    return sequence_obstacle(config, sequence, size)


def tensor_parallel(model: LanguageModel | ScalarModel, mesh: DeviceMesh) -> tuple[str, ...]:
    """Cut the model in place over the ranks of a mesh of one dimension; returns notes on what could not be cut.

    Every rank must hold the same weights, or the same meta tensors: each keeps its slice, nothing is sent.  Comes after
    LoRA is attached, before master weights and `fully_shard`.  Raises ModelError, see `tensor_obstacle`, on every rank
    before anything is changed.
    """
    if mesh.ndim != 1:
        raise ModelError(f"the tensor mesh has {mesh.ndim} dimensions", fix='pass mesh["tensor"]')
    backbone = model.trunk.model
    sequences = 1 if model.trunk.tokens is None else model.trunk.tokens.sequences
    obstacle = tensor_obstacle(backbone.config, mesh.size(), sequences)
    if obstacle is not None:
        raise ModelError(obstacle, fix="change the tensor axis of this role, or the model")
    if mesh.size() == 1:
        return ()
    for block in blocks_of(backbone):
        for name, style in PLANS[backbone.config.model_type].items():
            _cut_layer(block, name, style, mesh)
    return _cut_vocabulary(model, mesh)


def _cut_layer(block: nn.Module, name: str, style: str, mesh: DeviceMesh) -> None:
    """One module of a block, in place."""
    layer = block.get_submodule(name)
    if style == "norm":
        owner, _, leaf = name.rpartition(".")
        setattr(block.get_submodule(owner), leaf, HeadNorm(layer, mesh.get_group()))
        return
    make: type[ColwiseParallel | RowwiseParallel] = ColwiseParallel if style == "column" else RowwiseParallel
    if not isinstance(layer, LoraLayer):
        _distribute(layer, mesh, make())
        return
    _distribute(layer.get_base_layer(), mesh, make())
    for adapter in layer.lora_B.values() if style == "column" else layer.lora_A.values():
        _distribute(adapter, mesh, make())


def _distribute(layer: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    parallelize_module(layer, mesh, style, src_data_rank=None)


def _cut_vocabulary(model: LanguageModel | ScalarModel, mesh: DeviceMesh) -> tuple[str, ...]:
    """Embedding and output layer, tied where they were."""
    embedding = model.trunk.model.get_input_embeddings()
    head = model.model.get_output_embeddings() if isinstance(model, LanguageModel) else None
    tokens = embedding_matrix(model.trunk.model).shape[0]
    if tokens % mesh.size():
        return (f"{mesh.size()} tensor ranks do not divide {tokens} embeddings: embedding and output layer stay whole",)
    tied = head is not None and head.weight is embedding.weight
    _distribute(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if head is None:
        return ()
    assert isinstance(model, LanguageModel)
    _distribute(head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    if tied:
        head.weight = embedding.weight
    model.vocabulary = VocabularyParallel(mesh.get_group(), mesh.get_local_rank() * (tokens // mesh.size()))
    model.model.register_forward_hook(_whole_logits)
    return ()


def _whole_logits(module: nn.Module, args: Any, output: Any) -> Any:
    """What `model(...)` returns has the logits of the whole vocabulary, the same on every rank, as generation needs."""
    if isinstance(output.logits, DTensor):
        output.logits = output.logits.full_tensor()
    return output


class HeadNorm(nn.Module):
    """A norm over single heads, on the heads of this rank: the gradient of its weight is summed over the ranks."""

    def __init__(self, norm: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        weight = norm.weight
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self._norm = (norm,)  # not a submodule: the weight has one name, the one it had
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        out = functional_call(self._norm[0], {"weight": copied(self.weight, self._group)}, (x,))
        assert isinstance(out, torch.Tensor)
        return out
