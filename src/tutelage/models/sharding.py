"""FSDP2 over the blocks of a model and its root, and where a rank's part of a weight lies in the whole.

(Zhao et al. 2023, arXiv:2304.11277; HSDP: shards inside a group of ranks, replicas between groups.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tutelage.errors import ConfigError
from tutelage.models.computation import Computation
from tutelage.models.parallel.stages import Stages
from tutelage.models.parallel.tokens import TokenParallel

T = TypeVar("T", bound=Tensor)


@dataclass(frozen=True, eq=False)
class Sharding:
    """How the weights of a model are spread over ranks.

    mesh         one dimension (shards), or two (replicas, shards); None: not sharded, cut by `parallelize` alone.
    everyone     one dimension over all ranks that hold the model.
    device       where this rank computes.
    agree        raises on every rank where one brings an error (collective).
    dtype        of the computation; the loader sets it.
    offload      parameters, gradients and optimiser in the host's memory, moved to the accelerator block by block.
    parallelize  cuts a LanguageModel or ScalarModel over tensor-parallel ranks, in place, before it is sharded.
    tokens       the ranks that packed rows are cut over.
    stages       the pipeline stages that the blocks are cut into, of which this rank has one; None: it has all blocks.
    keep_stage   drops the other stages' weights from a LanguageModel or ScalarModel, in place, after `parallelize`.

    Raises ConfigError for an offload that has nowhere to go.
    """

    mesh: DeviceMesh | None
    everyone: DeviceMesh
    device: torch.device
    agree: Callable[[Exception | None], None]
    dtype: torch.dtype = torch.float32
    offload: bool = False
    parallelize: Callable[[Any], object] | None = None
    tokens: TokenParallel | None = None
    stages: Stages | None = None
    keep_stage: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        if self.offload and self.device.type == "cpu":
            raise ConfigError(
                "CPU offload is asked for, and the model computes on the CPU already",
                fix="switch offload off, or give the ranks an accelerator",
            )

    @property
    def storage(self) -> torch.device:
        """Where a rank's part of the weights rests."""
        return torch.device("cpu") if self.offload else self.device

    def probing(self) -> Sharding:
        """All ranks as shards, in float32: how a model is held while it is looked at."""
        return replace(
            self, mesh=self.everyone, dtype=torch.float32, parallelize=None, tokens=None, stages=None, keep_stage=None
        )

    def spread(self, model: Any, blocks: Iterable[nn.Module], keep: Iterable[nn.Module] = ()) -> None:
        """Cut and shard a LanguageModel or ScalarModel in place: every block, every module of `keep`, and the root."""
        if self.parallelize is not None:
            self.parallelize(model)
        if self.keep_stage is not None:
            self.keep_stage(model)
        self.shard(model.root, blocks, keep)

    def shard(self, root: Computation, blocks: Iterable[nn.Module], keep: Iterable[nn.Module] = ()) -> None:
        """Weights rest as they are and are gathered in `dtype`, those of `keep` in float32.

        Gradients are summed over ranks, in float32: the weights of a loss are of the whole mini-batch.  A pipeline
        stage stays gathered between its forward and backward passes, which alternate.  Modules that are not in `root`,
        or have no weights, belong to another stage.
        """
        if self.mesh is None:
            return
        narrow = None if self.dtype == torch.float32 else self.dtype
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy() if self.offload else OffloadPolicy()
        plan = [(block, policy) for block in blocks] + [(module, exact) for module in keep]
        inside = set(root.modules())
        here = [(m, precision) for m, precision in plan if m in inside and any(True for _ in m.parameters())]
        free = self.stages is None
        for module, precision in [*here, (root, policy)]:
            fully_shard(module, mesh=self.mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=free)
        for sharded in sharded_modules(root):
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def is_sharded(root: nn.Module) -> bool:
    return isinstance(root, FSDPModule)


@torch.no_grad()
def begin(root: nn.Module) -> None:
    """FSDP looks once, in its first forward, at which weights are trained; so it must not be one with an adapter off.

    Collective.  Called when all weights are in place.
    """
    if is_sharded(root):
        root(lambda: None)


@contextmanager
def gathered(root: nn.Module) -> Iterator[None]:
    """Inside, every weight is whole on every rank and a forward of any part of the model talks to nobody.

    Collective at both ends, so that ranks may run different numbers of forwards between them.
    """
    modules = sharded_modules(root)
    try:
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Groups of tensors that are spread over the same mesh in the same way, which alone mix in one operation."""
    groups: dict[Any, list[T]] = {}
    for tensor in tensors:
        spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(spread, []).append(tensor)
    return list(groups.values())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank; collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed(part: Tensor, like: Tensor) -> Tensor:
    """`part`, a rank's part of a tensor that is spread as `like` is, as that tensor."""
    if not isinstance(like, DTensor) or isinstance(part, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def place(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset): this rank's part is the block of that shape at that offset of the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)
