"""Shapes of a Llama-like decoder from its sizes alone, and how tensor parallel cuts them.  Torch-free.

Names and shapes are those of a Hugging Face checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tutelage.errors import ConfigError
from tutelage.transport.weights.boxes import Weight
from tutelage.transport.weights.placements import Cut

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Cut by output features (vocabulary), dimension 0."""
ROW = ("o_proj", "down_proj")
"""Cut by input features, dimension 1."""


@dataclass(frozen=True)
class Sizes:
    """head: whether `lm_head.weight` is moved too; of a tied one, where a stage or an engine needs its own copy."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    head: bool = False


SMOLLM2_135M = Sizes(49152, 576, 1536, 30, 9, 3, 64)


def llama_weights(sizes: Sizes, dtype: str = "float32") -> dict[str, Weight]:
    """Every weight of the model, in the order of the forward pass."""
    query, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    block = {
        "input_layernorm": (sizes.hidden,),
        "self_attn.q_proj": (query, sizes.hidden),
        "self_attn.k_proj": (kv, sizes.hidden),
        "self_attn.v_proj": (kv, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, query),
        "post_attention_layernorm": (sizes.hidden,),
        "mlp.gate_proj": (sizes.intermediate, sizes.hidden),
        "mlp.up_proj": (sizes.intermediate, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocabulary, sizes.hidden)}
    for layer in range(sizes.layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (sizes.hidden,)
    if sizes.head:
        shapes["lm_head.weight"] = (sizes.vocabulary, sizes.hidden)
    return {name: Weight(shape, dtype) for name, shape in shapes.items()}


def tensor_dim(name: str) -> int | None:
    """The dimension that tensor parallel cuts; None: not cut."""
    module = name.split(".")[-2]
    return 0 if module in COLUMN else 1 if module in ROW else None


def llama_cuts(weights: Mapping[str, Weight], *, pipeline: int = 1, nested: bool = False) -> dict[str, Cut]:
    """The cut of every weight.

    nested  FSDP cuts the dimension that tensor parallel cuts (`fully_shard`'s shard_placement_fn), not always rows.
    Blocks are spread evenly over the stages; the embedding is on the first, the final norm and the head on the last.

    Raises ConfigError for more stages than blocks.
    """
    layers = 1 + max(_layer(name) for name in weights)
    if pipeline > max(1, layers):
        raise ConfigError(f"{pipeline} pipeline stages for {layers} blocks", fix="use at most one stage a block")
    found = {}
    for name in weights:
        dim, layer = tensor_dim(name), _layer(name)
        outer = 0 if "embed" in name else pipeline - 1
        stage = layer * pipeline // layers if layer >= 0 else outer
        found[name] = Cut(dim, dim if nested and dim is not None else 0, (stage,))
    return found


def _layer(name: str) -> int:
    match = re.search(r"\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def bytes_by_cut(weights: Mapping[str, Weight], names: Iterable[str] | None = None) -> dict[int | None, int]:
    """Bytes of the weights that tensor parallel cuts in dimension 0, in dimension 1, and not at all (None)."""
    found: dict[int | None, int] = {0: 0, 1: 0, None: 0}
    for name in weights if names is None else names:
        found[tensor_dim(name)] += weights[name].nbytes
    return found
