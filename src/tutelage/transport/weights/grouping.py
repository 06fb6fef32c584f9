"""Which generation rank each training rank becomes, so that it keeps the slices that it has.  Torch-free.

HybridFlow (Sheng et al. 2024, arXiv:2409.19256, section 5.3): generation groups take training ranks at regular
intervals, t / t_g in the tensor axis and p / p_g in the pipeline axis, so that a rank's training shard lies inside its
generation shard.  The ranks between two neighbours of a group form a micro data-parallel group: they hold the same
generation shard, and together all of it.
"""

from __future__ import annotations

from tutelage.errors import ConfigError
from tutelage.layout import Layout


def generation_layout(training: Layout, *, tensor: int, pipeline: int = 1) -> Layout:
    """Generation on all ranks of a training layout: tensor x pipeline for each engine, replicas for the rest.

    Raises ConfigError where they do not divide the ranks.
    """
    if training.size % (tensor * pipeline):
        raise ConfigError(
            f"tensor {tensor} x pipeline {pipeline} of generation do not divide the {training.size} ranks ({training})",
            fix=f"choose sizes whose product divides {training.size}",
        )
    return Layout(pipeline=pipeline, replicate=training.size // (tensor * pipeline), tensor=tensor)


def contiguous(training: Layout, generation: Layout) -> tuple[int, ...]:
    """Vanilla grouping: rank r of training is rank r of generation, whatever it holds."""
    _same_size(training, generation)
    return tuple(range(training.size))


def strided(training: Layout, generation: Layout) -> tuple[int, ...]:
    """result[r]: the rank of `generation` that training rank r becomes; each generation rank once.

    Where a training shard can lie inside a generation shard, or the other way round, it does: on the axis of slices
    (tensor, then FSDP shards: W = tensor x shard of them) and on the pipeline axis.  A rank then receives

        M / (t_g p_g) - M / (max(W, t_g) max(p, p_g))          (formulas.nested, formulas.grouped)

    With t_g > W, ranks of one slice but of different stages or replicas take different sub-slices; with p_g > p,
    likewise.

    Raises ConfigError where sizes neither divide nor are divided: no grouping lets every rank keep its shard.
    """
    _same_size(training, generation)
    slices = training.tensor * training.shard
    others = training.size // (slices * training.pipeline)
    fan_tensor, fine_tensor = _ratio(generation.tensor, slices, "tensor")
    fan_stage, fine_stage = _ratio(generation.pipeline, training.pipeline, "pipeline")
    result = []
    for rank in range(training.size):
        place = training.coordinates(rank)
        piece = place["tensor"] * training.shard + place["shard"]
        kept, spare = (piece // fine_tensor, piece % fine_tensor), fine_tensor
        stage, rest = divmod(place["pipeline"], fine_stage)
        free = (training.part(rank, ("replicate", "context", "sequence")) * fine_stage + rest) * spare + kept[1]
        free, sub_tensor = divmod(free, fan_tensor)
        replica, sub_stage = divmod(free, fan_stage)
        tensor, pipeline = kept[0] * fan_tensor + sub_tensor, stage * fan_stage + sub_stage
        result.append((pipeline * generation.replicate + replica) * generation.tensor + tensor)
    if sorted(result) != list(range(training.size)):
        raise ConfigError(
            f"{others * fine_stage * fine_tensor} ranks share each shard of training ({training}); generation "
            f"({generation}) needs {fan_tensor * fan_stage} of them for one replica",
            fix="choose a generation layout whose sizes divide those of training",
        )
    return tuple(result)


def _ratio(generation: int, training: int, axis: str) -> tuple[int, int]:
    """(generation / training, 1) or (1, training / generation)."""
    if generation % training and training % generation:
        raise ConfigError(
            f"generation has {generation} {axis} slices, training {training}: a shard cannot lie inside the other's",
            fix="choose sizes of which one divides the other",
        )
    return max(1, generation // training), max(1, training // generation)


def _same_size(training: Layout, generation: Layout) -> None:
    if training.size != generation.size or generation.shard * generation.context * generation.sequence > 1:
        raise ConfigError(
            f"generation on {generation.size} ranks ({generation}) cannot stand on the {training.size} ranks of "
            f"training ({training})",
            fix="use generation_layout(training, tensor=..., pipeline=...)",
        )
