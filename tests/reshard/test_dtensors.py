"""Placements of real DTensors: `fully_shard`, tensor parallel, both, HSDP; the local data is what the blocks say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spmd_kit import run_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tutelage.errors import ShapeError
from tutelage.layout import Layout
from tutelage.transport.weights.boxes import Blocks, Weight
from tutelage.transport.weights.dtensors import blocks_at, boxes_of, described, gathered
from tutelage.transport.weights.moving import move
from tutelage.transport.weights.placements import Cut, placed, whole_on
from tutelage.transport.weights.planning import plan


class Net(nn.Module):
    """A column-parallel and a row-parallel matrix with biases, a norm that is not cut; sizes of the caller."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x)))


def net(width: int, inner: int) -> Net:
    torch.manual_seed(3)
    model = Net(width, inner)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def assembled(local: Tensor, blocks: Blocks, full: Tensor) -> None:
    """Every element of the local tensor is the one of the whole tensor that its block names."""
    seen = torch.zeros(local.shape, dtype=torch.int64)
    for block in blocks:
        at = tuple(slice(a, a + stop - start) for a, (start, stop) in zip(block.at, block.box, strict=True))
        assert torch.equal(local[at], full[tuple(slice(start, stop) for start, stop in block.box)])
        seen[at] += 1
    assert bool((seen == 1).all())


def shapes_rank(rank: int, world: int, sizes: list[tuple[int, int]]) -> None:
    kinds: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]] = {
        "fsdp": ((4,), ("shard",), ("shard",)),
        "hsdp": ((2, 2), ("replicate", "shard"), ("replicate", "shard")),
        "tp": ((4,), ("tensor",), ()),
        "fsdp x tp": ((2, 2), ("shard", "tensor"), ("shard",)),
    }
    for width, inner in sizes:
        full = {name: parameter.detach() for name, parameter in net(width, inner).named_parameters()}
        for shape, names, data in kinds.values():
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            model = net(width, inner)
            if "tensor" in names:
                parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if data:
                fully_shard(model, mesh=mesh[data])
            check_model(model, full, rank)


def check_model(model: nn.Module, full: dict[str, Tensor], rank: int) -> None:
    weights, holding, local = described(dict(model.named_parameters()))
    for name, tensor in full.items():
        assert weights[name] == Weight(tuple(tensor.shape), "float32")
        assembled(local[name], holding[name], tensor)
    known, placement = gathered(weights, holding)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found = boxes_of(parameter)
            assert found == {other: placement[other][name] for other in found}
            assert set(found) == set(parameter.device_mesh.mesh.flatten().tolist())
    moved = move(plan(placement, whole_on(known, (1, 3)), known), local)
    assert list(moved.tensors) == (list(full) if rank in (1, 3) else [])
    assert all(torch.equal(moved.tensors[name], full[name]) for name in moved.tensors)


def test_modules_of_pytorch_on_four_ranks() -> None:
    """Even sizes, and sizes that neither 2 nor 4 divides, down to fewer rows than ranks."""
    run_ranks(shapes_rank, 4, [(8, 16), (5, 7), (2, 3)])


def six_rank(rank: int, world: int) -> None:
    full = {name: parameter.detach() for name, parameter in net(5, 7).named_parameters()}
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("shard", "tensor"))
    model = net(5, 7)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    check_model(model, full, rank)


def test_seven_rows_over_three_shards_of_two_tensor_slices() -> None:
    """Tensor slices of 4 and 3 rows, cut to 2 + 2 + 0 and 1 + 1 + 1: from left to right, rank 4 would have a row."""
    run_ranks(six_rank, 6)


def strided_in(placements: tuple[Placement, ...]) -> bool:
    """torch itself distributes strided shards of even sizes alone."""
    return any(isinstance(placement, _StridedShard) for placement in placements)


def orders_rank(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    orders: list[tuple[Placement, ...]] = [
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Shard(0), _StridedShard(0, split_factor=2)),
        (Shard(1), Shard(0)),
        (Replicate(), Shard(1)),
        (Shard(0), Replicate()),
    ]
    for size in (8, 7, 6, 5):
        full = torch.arange(size * 6.0).view(size, 6)
        for placements in orders if size == 8 else [order for order in orders if not strided_in(order)]:
            tensor = distribute_tensor(full, mesh, placements)
            assembled(tensor.to_local(), boxes_of(tensor)[rank], full)
    with pytest.raises(ShapeError, match="is not a slice of a weight"):
        boxes_of(DTensor.from_local(torch.ones(2, 2), mesh, (Partial(), Replicate())))
    with pytest.raises(ShapeError, match=rf"rank {rank} holds \(3, 2\)"):
        boxes_of(
            DTensor.from_local(
                torch.ones(3, 2), mesh, (Shard(0), Shard(0)), shape=torch.Size((8, 2)), stride=(2, 1), run_check=False
            )
        )


def test_orders_of_shards_on_four_ranks() -> None:
    run_ranks(orders_rank, 4)


def test_hand_computed_strided_orders() -> None:
    def rows(placements: Any, coordinate: tuple[int, int]) -> list[int]:
        blocks = blocks_at((8, 3), placements, (2, 2), coordinate)
        return [row for block in blocks for row in range(*block.box[0])]

    plain = (Shard(0), Shard(0))
    fsdp_over_tensor = (_StridedShard(0, split_factor=2), Shard(0))
    interleaved = (Shard(0), _StridedShard(0, split_factor=2))
    coordinates = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rows(plain, c) for c in coordinates] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [rows(fsdp_over_tensor, c) for c in coordinates] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert [rows(interleaved, c) for c in coordinates] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [block.at for block in blocks_at((8, 3), interleaved, (2, 2), (0, 1))] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("size", range(1, 30))
def test_fsdp_over_tensor_parallel_is_the_cut_of_a_layout(size: int) -> None:
    for shard, tensor in ((2, 2), (2, 4), (4, 2), (3, 2), (2, 3)):
        weights = {"w": Weight((size, 2))}
        held = placed(weights, Layout(shard=shard, tensor=tensor), {"w": Cut(tensor=0)})
        placements = (_StridedShard(0, split_factor=tensor), Shard(0))
        for rank in range(shard * tensor):
            assert blocks_at((size, 2), placements, (shard, tensor), divmod(rank, tensor)) == held[rank]["w"]


def stages_rank(rank: int, world: int) -> list[str]:
    """Two pipeline stages on two FSDP ranks each; every rank knows its own stage alone."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = rank // 2
    mesh = dist.DeviceMesh.from_group(groups[stage], "cpu", mesh=[2 * stage, 2 * stage + 1])
    names = {0: "first", 1: "last"}
    full = {"first": torch.arange(12.0).view(6, 2), "last": torch.arange(10.0).view(5, 2) + 100}
    mine = names[stage]
    weights, holding, local = described({mine: distribute_tensor(full[mine], mesh, [Shard(0)])})
    known, placement = gathered(weights, holding)
    moved = move(plan(placement, whole_on(known, (0, 2)), known), local)
    assert all(torch.equal(tensor, full[name]) for name, tensor in moved.tensors.items())
    wrong = {"w": Weight((2 + rank, 2))}
    with pytest.raises(ShapeError, match=r"w is .* on rank 1"):
        gathered(wrong, {})
    return list(moved.tensors)


def test_pipeline_stages_tell_each_other_what_they_hold() -> None:
    assert run_ranks(stages_rank, 4) == [["first", "last"], [], ["first", "last"], []]
