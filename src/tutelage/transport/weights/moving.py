"""A plan carried out on a process group: buckets of bytes through all_to_all_single.

Works on gloo with CPU tensors, on NCCL with CUDA tensors, and on gloo with CUDA tensors through buckets in main memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from tutelage.errors import ConfigError, ShapeError, TrainingError
from tutelage.transport.weights.boxes import Blocks, Box, Holding, extent, local_shape, within
from tutelage.transport.weights.dtensors import torch_dtype
from tutelage.transport.weights.planning import Plan
from tutelage.transport.weights.rounds import Round, Transfer, check_bucket

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Moved:
    """What one rank has after a move.

    tensors   the local tensor of every weight that the target names for this rank.
    sent, received   bytes that this rank gave to and took from the collectives.
    kept      bytes of the target that it had: copied, or shared, without the wire.
    rounds    collectives; the same on all ranks.
    staged    bytes of the two staging buffers, at most the bucket.
    """

    tensors: dict[str, Tensor]
    sent: int
    received: int
    kept: int
    rounds: int
    staged: int


@torch.no_grad()
def move(
    plan: Plan,
    local: Mapping[str, Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    device: torch.device | str | None = None,
    share: bool = False,
) -> Moved:
    """The local tensors of the target.  Collective: every rank of the group calls it with the same plan.

    local   this rank's tensors by name, as the plan's source describes them; others are ignored.  Ranks of the plan
            are ranks of the group.  A rank of another mesh passes {}.
    device  of the target; None: of the local tensors; without any, the CPU, or the GPU of a group that is NCCL alone.
    share   a target that lies inside one block that the rank holds becomes a view of the local tensor, which costs no
            memory; an update of the weights then changes it.  False: every target is a copy.

    Memory above the source: the target and one bucket.  Before anything is sent the ranks agree that all can take part
    and have one plan.  A rank that dies during a round is noticed by its peers at the group's timeout.

    Raises ShapeError on a rank whose tensors are not those of the plan, ConfigError for a group that is too small, and
    TrainingError on its peers, or on all for plans that differ.
    """
    rank = dist.get_rank(group)
    problem = _problem(plan, local, dist.get_world_size(group), rank, bucket_bytes)
    where = torch.device(device) if device is not None else _device(local, group)
    wire = _wire_device(group, where)
    _agree((plan.fingerprint, bucket_bytes), problem, group, wire)
    have, want = plan.source.get(rank, {}), plan.target.get(rank, {})
    found = _allocated(plan, local, have, want, where, share)
    kept = 0
    for part in plan.kept:
        if part.dst == rank:
            kept += part.nbytes
            target = part_of(found[part.name], want[part.name], part.box)
            origin = part_of(local[part.name], have[part.name], part.box)
            if target.data_ptr() != origin.data_ptr() or target.device != origin.device:
                target.copy_(origin)
    schedule = plan.rounds(bucket_bytes, rank)
    out, into = _buffers(schedule, rank, wire)
    sent = received = 0
    for step in schedule:
        output, outgoing = _exchanged(step, rank, dist.get_world_size(group), local, have, out, into, group)
        sent, received = sent + outgoing, received + output.numel()
        _unpack(step, rank, output, found, want)
    return Moved(found, sent, received, kept, len(schedule), out.numel() + into.numel())


def part_of(tensor: Tensor, blocks: Blocks, box: Box) -> Tensor:
    """The view of a local tensor that holds `box` of the whole weight; the box lies inside one block."""
    block = next(block for block in blocks if within(box, block.box))
    begin = [at + low - start for at, (low, _), (start, _) in zip(block.at, box, block.box, strict=True)]
    return tensor[tuple(slice(low, low + size) for low, size in zip(begin, extent(box), strict=True))]


def _problem(plan: Plan, local: Mapping[str, Tensor], world: int, rank: int, bucket_bytes: int) -> Exception | None:
    if plan.ranks > world:
        return ConfigError(
            f"the plan names rank {plan.ranks - 1}, the group has {world} ranks", fix="plan for the group"
        )
    try:
        check_bucket(plan.weights, bucket_bytes)
    except ConfigError as error:
        return error
    for name, blocks in plan.source.get(rank, {}).items():
        if not blocks:
            continue
        shape, dtype = local_shape(blocks, plan.weights[name]), torch_dtype(plan.weights[name])
        if name not in local:
            return ShapeError(f"rank {rank} has no {name}, the plan says {shape}", fix="pass every local tensor")
        if tuple(local[name].shape) != shape or local[name].dtype != dtype:
            seen = f"{tuple(local[name].shape)} {local[name].dtype}"
            return ShapeError(
                f"{name} on rank {rank} is {seen}, the plan says {shape} {dtype}",
                fix="make the plan from the tensors that move",
            )
    return None


def _device(local: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> torch.device:
    """Of the local tensors; of the group's backend where a rank has none."""
    for tensor in local.values():
        return tensor.device
    on_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _wire_device(group: dist.ProcessGroup | None, where: torch.device) -> torch.device:
    """Where the buckets are: beside the tensors with NCCL; else in main memory."""
    if where.type == "cpu":
        return where
    backends = dist.get_backend_config(group)
    return where if f"{where.type}:gloo" not in backends else torch.device("cpu")


def _agree(
    terms: tuple[int, int], problem: Exception | None, group: dist.ProcessGroup | None, wire: torch.device
) -> None:
    mine = torch.tensor([int(problem is None), *terms], dtype=torch.int64, device=wire)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    if problem is not None:
        raise problem
    theirs = [vector.tolist() for vector in all_of_them]
    refused = [rank for rank, (ready, *_) in enumerate(theirs) if not ready]
    if refused:
        raise TrainingError(f"weights were not moved: ranks {refused} refused", fix="see the error of those ranks")
    other = [rank for rank, vector in enumerate(theirs) if vector != theirs[0]]
    if other:
        raise TrainingError(
            f"weights were not moved: ranks {other} have another plan or bucket size than rank 0",
            fix="give every rank the same arguments",
        )


def _allocated(
    plan: Plan, local: Mapping[str, Tensor], have: Holding, want: Holding, where: torch.device, share: bool
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, blocks in want.items():
        weight = plan.weights[name]
        whole = len(blocks) == 1 and any(within(blocks[0].box, own.box) for own in have.get(name, ()))
        if share and whole and local[name].device == where:
            found[name] = part_of(local[name], have[name], blocks[0].box)
        else:
            found[name] = torch.empty(local_shape(blocks, weight), dtype=torch_dtype(weight), device=where)
    return found


def _buffers(schedule: list[Round], rank: int, wire: torch.device) -> tuple[Tensor, Tensor]:
    most = [0, 0]
    for step in schedule:
        most[0] = max(most[0], sum(piece.nbytes for piece in step.pieces if piece.src == rank))
        most[1] = max(most[1], sum(piece.nbytes for piece in step.pieces if piece.dst == rank))
    return tuple(torch.empty(size, dtype=torch.uint8, device=wire) for size in most)  # type: ignore[return-value]


def _exchanged(
    step: Round,
    rank: int,
    world: int,
    local: Mapping[str, Tensor],
    have: Holding,
    out: Tensor,
    into: Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, int]:
    """(the bytes this rank received, ordered by their sender; how many it sent)."""
    sizes_out, sizes_in = [0] * world, [0] * world
    offset = 0
    for piece in step.pieces:
        if piece.src == rank:
            origin = part_of(local[piece.name], have[piece.name], piece.box)
            _typed(out, offset, piece, origin.dtype).copy_(origin)
            offset += piece.nbytes
            sizes_out[piece.dst] += piece.nbytes
        elif piece.dst == rank:
            sizes_in[piece.src] += piece.nbytes
    output = into[: sum(sizes_in)]
    dist.all_to_all_single(output, out[:offset], sizes_in, sizes_out, group=group)
    return output, offset


def _unpack(step: Round, rank: int, output: Tensor, found: Mapping[str, Tensor], want: Holding) -> None:
    offset = 0
    for piece in step.pieces:
        if piece.dst == rank:
            target = part_of(found[piece.name], want[piece.name], piece.box)
            target.copy_(_typed(output, offset, piece, target.dtype))
            offset += piece.nbytes


def _typed(buffer: Tensor, offset: int, piece: Transfer, dtype: torch.dtype) -> Tensor:
    """A piece's place in a bucket; aligned, since all pieces of a round have elements of one size."""
    return buffer[offset : offset + piece.nbytes].view(dtype).view(extent(piece.box))
