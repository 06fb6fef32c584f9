"""Pipeline parallelism: the blocks of a model cut into stages of consecutive ones (GPipe, Huang et al. 2019,
arXiv:1811.06965; 1F1B, Narayanan et al. 2019 and 2021, arXiv:2104.04473).

Shapes: n tokens of one packed row, H hidden.

The first stage has the embeddings and the first blocks, the last one the last blocks, the norm after them and the head.
What a stage does not have is replaced by stand-ins without weights, so that the rest keeps the names and places it has
in the whole model, and the architecture's own forward runs every stage: masks, rotary positions and the order of the
blocks stay its own.  Whatever the architecture does to embeddings before the first block (a scale, added positions) is
done again on later stages and dropped, since the stand-in of the first block puts the received states in its place.

Tied embeddings are on both ends, under the name they have in the whole model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tutelage.errors import ModelError, closest
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel
from tutelage.models.parallel.stages import Stages
from tutelage.models.weights import blocks_of


@dataclass(frozen=True)
class Parts:
    """Modules of a backbone that run before its blocks (token embeddings first), and after them."""

    before: tuple[str, ...]
    after: tuple[str, ...]


_PLAIN = Parts(("embed_tokens",), ("norm",))

PARTS: dict[str, Parts] = {
    "gemma": _PLAIN,
    "gemma2": _PLAIN,
    "gpt2": Parts(("wte", "wpe"), ("ln_f",)),
    "gpt_neox": Parts(("embed_in",), ("final_layer_norm",)),
    "granite": _PLAIN,
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "phi3": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "smollm3": _PLAIN,
    "starcoder2": _PLAIN,
}
"""By `model_type` of the configuration."""


def pipeline_obstacle(config: Any, size: int) -> str | None:
    """Why a model of this configuration cannot be cut into `size` stages, or None. Reads the configuration alone."""
    if size == 1:
        return None
    kind = config.model_type
    if kind not in PARTS:
        return f"{kind} has no pipeline plan; {', '.join(sorted(PARTS))} have one.{closest(kind, PARTS)}"
    depth = int(config.num_hidden_layers)
    if size > depth:
        return f"{size} pipeline stages for {depth} blocks of this {kind} model: a stage has at least one"
    return None


def stage_bounds(costs: Sequence[float], tail: float, count: int) -> list[tuple[int, int]]:
    """(first block, one after the last) of each of `count` stages, such that the costliest stage is as cheap as can be.

    costs: of each block; tail: what the last stage does besides.  Among equals the sum of squares is small; every stage
    has a block.  By dynamic programming over the cuts, O(count L^2).
    """
    depth = len(costs)
    assert 1 <= count <= depth, f"{count} stages, {depth} blocks"
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, (0,))}]
    for stage in range(1, count + 1):
        row: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        ends = [depth] if stage == count else range(stage, depth - (count - stage) + 1)
        for end in ends:
            extra = tail if stage == count else 0.0
            row[end] = min(
                (max(worst, here), squares + here * here, (*cuts, end))
                for start, (worst, squares, cuts) in best[-1].items()
                if start < end
                for here in [before[end] - before[start] + extra]
            )
        best.append(row)
    cuts = best[-1][depth][2]
    return list(itertools.pairwise(cuts))


def keep_stage(model: LanguageModel | ScalarModel, stages: Stages) -> None:
    """Keep the weights of this rank's stage alone, in place; every stage starts from the same model, or from meta.

    Comes after LoRA and tensor-parallel cuts, before master weights and `fully_shard`.  The cost of a block is its
    parameters, of the head too; looking up embeddings costs nothing.  Raises ModelError, on every rank and before
    anything is changed, for what `pipeline_obstacle` refuses and for a trunk that is not packed.
    """
    if stages.count == 1:
        return
    backbone = model.trunk.model
    obstacle = pipeline_obstacle(backbone.config, stages.count)
    if obstacle is None and model.trunk.layout != "packed":
        obstacle = f"{type(backbone).__name__} cannot be packed, so it cannot be cut into pipeline stages"
    if obstacle is not None:
        raise ModelError(obstacle, fix="change the pipeline axis of this role, or the model")
    parts, blocks = PARTS[backbone.config.model_type], blocks_of(backbone)
    _require_all_known(backbone, parts, blocks)
    heads = _heads(model)
    costs = [_size(block.parameters()) for block in blocks]
    tail = _size(parameter for _, _, head in heads for parameter in head.parameters())
    start, end = stage_bounds(costs, tail, stages.count)[stages.index]
    embedding = backbone.get_input_embeddings()
    matrix = embedding.weight
    assert isinstance(matrix, nn.Parameter)
    tied = any(parameter is matrix for _, _, head in heads for parameter in head.parameters())
    for i in range(len(blocks)):
        if not start <= i < end:
            blocks[i] = Through()
    if not stages.first:
        inlet = Inlet(matrix if tied and stages.last else None)
        setattr(backbone, parts.before[0], inlet)
        for name in parts.before[1:]:
            setattr(backbone, name, Nothing())
        blocks[0] = Arrival(inlet)
    if not stages.last:
        for name in parts.after:
            setattr(backbone, name, Through())
        for owner, name, _ in heads:
            setattr(owner, name, Through())
        if isinstance(model, LanguageModel):
            model.logits = _no_logits


def inlet_of(model: LanguageModel | ScalarModel) -> Inlet | None:
    """Where received states enter a stage; None on the first one."""
    found = model.trunk.model.get_input_embeddings()
    return found if isinstance(found, Inlet) else None


def _heads(model: LanguageModel | ScalarModel) -> list[tuple[nn.Module, str, nn.Module]]:
    """(owner, attribute, module) of what is computed from the last hidden states."""
    if isinstance(model, ScalarModel):
        return [(model, name, layer) for name in ("dense", "score") if (layer := getattr(model, name)) is not None]
    head = model.model.get_output_embeddings()
    path = next(name for name, module in model.model.named_modules(remove_duplicate=False) if module is head)
    owner, _, leaf = path.rpartition(".")
    assert head is not None
    return [(model.model.get_submodule(owner), leaf, head)]


def _require_all_known(backbone: PreTrainedModel, parts: Parts, blocks: nn.ModuleList) -> None:
    """A weight outside blocks and parts would be on every stage, and its gradient on none of them whole."""
    known = {id(p) for p in blocks.parameters()}
    for name in (*parts.before, *parts.after):
        known |= {id(p) for p in backbone.get_submodule(name).parameters()}
    stray = [name for name, p in backbone.named_parameters() if id(p) not in known]
    if stray:
        raise ModelError(
            f"{type(backbone).__name__} has weights that belong to no pipeline stage: {', '.join(stray[:3])}",
            fix="set the pipeline axis of this role to 1",
        )


def _size(parameters: Iterable[nn.Parameter]) -> float:
    return float(sum(math.prod(parameter.shape) for parameter in parameters))


def _no_logits(hidden_nH: Tensor) -> Tensor:
    raise ModelError("the output layer is on the last pipeline stage")


# ---- stand-ins ----


class Inlet(nn.Module):
    """In place of the token embeddings: the hidden states that the stage before sent.

    hidden  (1, at least n, H): set before each forward.
    weight  the embedding matrix where the last stage's head is tied to it, else None.
    """

    def __init__(self, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.hidden: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """ids (1, n) -> (1, n, H)."""
        return self.first(ids.shape[1])

    def first(self, count: int) -> Tensor:
        assert self.hidden is not None, "nothing was received"
        return self.hidden[:, :count]


class Arrival(nn.Module):
    """In place of the first block, on a later stage: what was received, whatever was done to it since."""

    def __init__(self, inlet: Inlet) -> None:
        super().__init__()
        self._inlet = (inlet,)  # not a submodule: it has its own place

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._inlet[0].first(hidden.shape[1])


class Through(nn.Module):
    """In place of a block or a norm of another stage."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class Nothing(nn.Module):
    """In place of embeddings that are added to those of the tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())
