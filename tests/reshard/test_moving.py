"""Weights between layouts on gloo ranks: results against slices of whole tensors, bytes against plan and formulas."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from reshard_kit import TINY, full_tensors, measured_move, sliced
from spmd_kit import run_ranks
from torch import Tensor
from torch import distributed as dist

from tutelage.errors import ConfigError, ShapeError, TrainingError
from tutelage.layout import Layout
from tutelage.transport.weights import formulas
from tutelage.transport.weights.boxes import Block, Placement, Weight, one_block, whole
from tutelage.transport.weights.grouping import generation_layout, strided
from tutelage.transport.weights.llama import bytes_by_cut, llama_cuts, llama_weights
from tutelage.transport.weights.moving import move
from tutelage.transport.weights.placements import Cut, on_ranks, placed, whole_on
from tutelage.transport.weights.planning import Plan, plan

WEIGHTS = llama_weights(TINY)
SIZES = bytes_by_cut(WEIGHTS)
MATRICES, REST = SIZES[0] + SIZES[1], SIZES[None]


def training(layout: Layout, nested: bool = True) -> Placement:
    return placed(WEIGHTS, layout, llama_cuts(WEIGHTS, pipeline=layout.pipeline, nested=nested))


def generation(layout: Layout, tensor: int, pipeline: int = 1) -> Placement:
    after = generation_layout(layout, tensor=tensor, pipeline=pipeline)
    return placed(WEIGHTS, after, llama_cuts(WEIGHTS, pipeline=pipeline), numbers=strided(layout, after))


def move_rank(rank: int, world: int, cases: list[tuple[Plan, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each case gave on this rank; every local tensor of the result equals the slice of the whole one."""
    reports = []
    for made, settings in cases:
        full = full_tensors(made.weights)
        local = sliced(full, made.source, rank)
        moved, sent, received = measured_move(made, local, **settings)
        expected = sliced(full, made.target, rank)
        assert [name for name, tensor in moved.tensors.items() if tensor.numel()] == list(expected)
        assert list(moved.tensors) == list(made.target.get(rank, {}))
        for name in expected:
            tensor = moved.tensors[name]
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name]), name
        for name, tensor in sliced(full, made.source, rank).items():
            assert torch.equal(local[name], tensor), f"the source {name} changed"
        assert (moved.sent, moved.received) == (sent, received)
        reports.append({"sent": sent, "received": received, "kept": moved.kept, "rounds": moved.rounds})
        assert moved.staged <= settings.get("bucket_bytes", moved.staged)
    return reports


def run_cases(world: int, cases: list[tuple[Plan, dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """[case][rank]; the bytes on the wire are those of the plan, rank by rank."""
    by_rank = run_ranks(move_rank, world, cases)
    by_case = [[by_rank[rank][index] for rank in range(world)] for index in range(len(cases))]
    for (made, _), reports in zip(cases, by_case, strict=True):
        assert [report["sent"] for report in reports] == [made.sent.get(rank, 0) for rank in range(world)]
        assert [report["received"] for report in reports] == [made.received.get(rank, 0) for rank in range(world)]
        assert len({report["rounds"] for report in reports}) == 1
    return by_case


def received(reports: list[dict[str, Any]]) -> list[int]:
    return [report["received"] for report in reports]


def test_layouts_on_four_ranks() -> None:
    pairs = {
        "fsdp4 to tp2, two replicas": (Layout(shard=4), 2, 1),
        "fsdp2 x tp2 to tp4": (Layout(shard=2, tensor=2), 4, 1),
        "tp4 to tp2": (Layout(tensor=4), 2, 1),
        "tp2 x pp2 to tp2": (Layout(pipeline=2, tensor=2), 2, 1),
        "tp2 x pp2 to whole": (Layout(pipeline=2, tensor=2), 1, 1),
        "pp4 to tp2 x pp2": (Layout(pipeline=4), 2, 2),
        "hsdp 2 x 2 to whole": (Layout(replicate=2, shard=2), 1, 1),
    }
    cases = [
        (plan(training(before), generation(before, tensor, pipeline), WEIGHTS), {"bucket_bytes": 8192})
        for before, tensor, pipeline in pairs.values()
    ]
    found = dict(zip(pairs, run_cases(4, cases), strict=True))
    norms = formulas.nested(REST, 4, 1)
    assert received(found["fsdp4 to tp2, two replicas"]) == [formulas.nested(MATRICES, 4, 2) + norms] * 4
    assert received(found["fsdp2 x tp2 to tp4"]) == [formulas.nested(REST, 2, 1)] * 4
    assert received(found["tp4 to tp2"]) == [formulas.grouped(MATRICES, 4, 1, 2, 1)] * 4
    for name, t_g in (("tp2 x pp2 to tp2", 2), ("tp2 x pp2 to whole", 1)):
        expected = formulas.grouped(MATRICES, 2, 2, t_g, 1) + formulas.grouped(REST, 1, 2, 1, 1)
        assert sum(received(found[name])) == 4 * expected
    assert received(found["hsdp 2 x 2 to whole"]) == [formulas.nested(MATRICES + REST, 2, 1)] * 4
    assert all(report["rounds"] > 1 for reports in found.values() for report in reports if report["received"] > 8192)


def test_other_ranks_and_other_meshes_on_four_ranks() -> None:
    one_rank = (plan(training(Layout(replicate=2, shard=2)), whole_on(WEIGHTS, (3,)), WEIGHTS), {})
    sharded = training(Layout(shard=2))
    tensor = placed(WEIGHTS, Layout(tensor=2), llama_cuts(WEIGHTS))
    to_engine = (plan(sharded, on_ranks(tensor, {0: 2, 1: 3}), WEIGHTS), {"bucket_bytes": 4096})
    # A role that moves, with its optimiser moments: weights of the same shape under other names.
    state = WEIGHTS | {f"exp_avg.{name}": weight for name, weight in WEIGHTS.items()}
    cuts = {name: Cut() for name in state}
    before = placed(state, Layout(shard=2), cuts)
    pool = (plan(before, on_ranks(before, {0: 3, 1: 2}), state), {"bucket_bytes": 1 << 20})
    found = run_cases(4, [one_rank, to_engine, pool])
    assert received(found[0]) == [0, 0, 0, formulas.nested(MATRICES + REST, 2, 1)]
    assert {report["sent"] for report in found[0][:3]} != {0}
    assert received(found[1]) == [0, 0, *[formulas.elsewhere(MATRICES, 2) + formulas.elsewhere(REST, 1)] * 2]
    assert sum(received(found[2])) == 2 * (MATRICES + REST)


def test_uneven_sizes_scalars_and_mixed_dtypes() -> None:
    weights = {
        "scalar": Weight(()),
        "vector": Weight((7,), "bfloat16"),
        "short": Weight((2, 5)),
        "matrix": Weight((13, 9)),
        "half": Weight((6, 5, 3), "bfloat16"),
        "bytes": Weight((11, 3), "uint8"),
        "double": Weight((5, 4), "float64"),
    }
    cuts = {name: Cut(tensor=None if name in ("scalar", "vector") else 1, shard=0) for name in weights}
    layouts = [Layout(shard=4), Layout(shard=2, tensor=2), Layout(tensor=4), Layout(shard=3), Layout(tensor=3)]
    placements = [placed(weights, layout, cuts) for layout in layouts]
    cases = [
        (plan(one, other, weights), {"bucket_bytes": bucket})
        for one in placements
        for other, bucket in zip(placements, (16, 40, 200, 1000, 1 << 20), strict=True)
    ]
    run_cases(4, cases)


def test_two_ranks_share_what_they_keep() -> None:
    reports = run_ranks(share_rank, 2)
    assert reports == [(0, 0, True, True), (0, 0, True, True)]


def share_rank(rank: int, world: int) -> tuple[int, int, bool, bool]:
    weights = {"w": Weight((8, 6))}
    source, target = whole_on(weights, (0, 1)), placed(weights, Layout(tensor=2), {"w": Cut(tensor=1)})
    made, local = plan(source, target, weights), {"w": torch.arange(48.0).view(8, 6)}
    viewed = move(made, local, share=True).tensors["w"]
    copied = move(made, local).tensors["w"]
    local["w"].add_(100)
    columns = slice(3 * rank, 3 * rank + 3)
    return (
        made.wire_bytes,
        move(made, local, share=True).sent,
        torch.equal(viewed, local["w"][:, columns]),
        torch.equal(copied, torch.arange(48.0).view(8, 6)[:, columns]),
    )


def test_local_tensors_of_several_blocks() -> None:
    run_ranks(blocks_rank, 2)


def blocks_rank(rank: int, world: int) -> None:
    """Rank r holds every other row, in reverse order of its blocks; then columns of all rows in two blocks."""
    weights = {"w": Weight((6, 4))}
    full = torch.arange(24.0).view(6, 4)
    source = {
        r: {"w": tuple(Block(((row, row + 1), (0, 4)), (2 - index, 0)) for index, row in enumerate(range(r, 6, 2)))}
        for r in range(2)
    }
    target = {
        r: {"w": (Block(((0, 3), (2 * r, 2 * r + 2)), (3, 0)), Block(((3, 6), (2 * r, 2 * r + 2)), (0, 0)))}
        for r in range(2)
    }
    local = {"w": full[rank::2].flip(0).clone()}
    moved, _, received_bytes = measured_move(plan(source, target, weights), local)
    columns = full[:, 2 * rank : 2 * rank + 2]
    assert torch.equal(moved.tensors["w"], torch.cat([columns[3:], columns[:3]]))
    assert received_bytes == 3 * 2 * 4


def test_a_move_needs_the_target_and_one_bucket() -> None:
    """32 MiB of source and 32 MiB of target on each rank, two buckets of 1 MiB: peak memory grows by target + slack."""
    for grown, target, bucket in run_ranks(memory_rank, 2):
        assert target <= grown <= target + bucket + (6 << 20)


def memory_rank(rank: int, world: int) -> tuple[int, int, int]:
    weights = {f"w{index}": Weight((1024, 4096)) for index in range(4)}
    cuts = {name: Cut(tensor=1) for name in weights}
    made = plan(placed(weights, Layout(shard=2), cuts), placed(weights, Layout(tensor=2), cuts), weights)
    local = {name: torch.ones(512, 4096) for name in weights}
    bucket = 1 << 20
    small = {"w": Weight((4, 4))}
    rows = placed(small, Layout(shard=2), {"w": Cut()})
    move(plan(rows, on_ranks(rows, {0: 1, 1: 0}), small), {"w": torch.ones(2, 4)})
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    moved = move(made, local, bucket_bytes=bucket)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return grown, sum(t.numel() * t.element_size() for t in moved.tensors.values()), bucket


@pytest.mark.parametrize(
    ("case", "own", "peer"),
    [
        ("missing", "ShapeError: rank 1 has no w", "TrainingError: weights were not moved: ranks [1] refused"),
        ("shape", "ShapeError: w on rank 1 is (3, 6) torch.float32, the plan says (4, 6)", "ranks [1] refused"),
        ("dtype", "ShapeError: w on rank 1 is (4, 6) torch.float64", "ranks [1] refused"),
        ("plan", "ranks [1] have another plan or bucket size", "ranks [1] have another plan or bucket size"),
        ("bucket", "ranks [1] have another plan or bucket size", "ranks [1] have another plan or bucket size"),
        ("small bucket", "ConfigError: bucket_bytes is 7", "ConfigError: bucket_bytes is 7"),
        ("large plan", "ConfigError: the plan names rank 2, the group has 2", "ConfigError: the plan names rank 2"),
    ],
)
def test_what_does_not_fit_is_refused_by_all_ranks(case: str, own: str, peer: str) -> None:
    first, second = run_ranks(wrong_rank, 2, case)
    assert own in second
    assert peer in first


def wrong_rank(rank: int, world: int, case: str) -> str:
    weights = {"w": Weight((8, 6))}
    source = placed(weights, Layout(shard=2), {"w": Cut()})
    target = whole_on(weights, (2,) if case == "large plan" else (0,))
    local: dict[str, Tensor] = {"w": torch.zeros(4, 6)}
    bucket = 7 if case == "small bucket" else 1 << 20
    if rank == 1:
        local = {"missing": {}, "shape": {"w": torch.zeros(3, 6)}, "dtype": {"w": torch.zeros(4, 6).double()}}.get(
            case, local
        )
        target = whole_on(weights, (1,)) if case == "plan" else target
        bucket = 1 << 19 if case == "bucket" else bucket
    try:
        move(plan(source, target, weights), local, bucket_bytes=bucket)
    except (ShapeError, ConfigError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return "moved"


def test_a_group_of_some_ranks() -> None:
    assert run_ranks(group_rank, 3) == [None, 24, 24]


def group_rank(rank: int, world: int) -> int | None:
    """Ranks of a plan are those of the group: group ranks 0 and 1 are ranks 1 and 2."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    weights = {"w": Weight((4, 3))}
    source = placed(weights, Layout(shard=2), {"w": Cut()})
    made = plan(source, {r: {"w": one_block(whole((4, 3)))} for r in range(2)}, weights)
    full = torch.arange(12.0).view(4, 3)
    moved = move(made, {"w": full[2 * (rank - 1) : 2 * rank].clone()}, group)
    assert torch.equal(moved.tensors["w"], full)
    return moved.received
