"""The device mesh of a layout, and the groups of ranks that an engine talks to.

The default process group exists before any of this; it is made by the launcher, with the deadline of its collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tutelage.errors import ConfigError
from tutelage.layout import AXES, DATA_AXES, WHOLE_WEIGHT_AXES, Layout

SHARD_AXES = ("shard", "context", "sequence")
"""The axes that FSDP shards weights over: ranks that differ in them hold the same tensor-parallel part."""


@dataclass(frozen=True, eq=False)
class RankMesh:
    """The mesh of one layout, on this rank.

    mesh    all axes of `layout.AXES`, also those of size 1.
    merged  one-dimensional meshes over several axes, by those axes.
    everyone  one dimension over all ranks.
    """

    layout: Layout
    device: torch.device
    mesh: DeviceMesh
    merged: dict[tuple[str, ...], DeviceMesh]
    everyone: DeviceMesh

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def data_part(self) -> int:
        """Which part of a mini-batch this rank works on."""
        return self.layout.part(self.rank)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks with different parts of a mini-batch: replicate x shard."""
        return self.along(DATA_AXES).get_group()

    @property
    def sum_group(self) -> dist.ProcessGroup:
        """Ranks whose gradients of the same weights are summed: replicate x shard x context x sequence."""
        return self.along(WHOLE_WEIGHT_AXES).get_group()

    @property
    def world_group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None
        return group

    @property
    def shards(self) -> int:
        """Ranks that a weight is sharded over by FSDP."""
        return self.layout.parts(SHARD_AXES)

    @property
    def peers(self) -> int:
        """Ranks that compute the loss of the same rows, each through its own tokens: context x sequence."""
        return self.layout.context * self.layout.sequence

    def along(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The one-dimensional mesh over one axis, or over several (those of `merged`), through this rank."""
        large = tuple(axis for axis in axes if getattr(self.layout, axis) > 1)
        if len(large) > 1:
            return self.merged[large]
        return self.mesh[large[0] if large else axes[0]]

    def fsdp(self) -> DeviceMesh:
        """What `fully_shard` takes: one dimension, and replicas before it where there are several (HSDP)."""
        sharded = self.along(SHARD_AXES)
        if self.layout.replicate == 1:
            return sharded
        names = sharded.mesh_dim_names
        assert names is not None
        return self.mesh["replicate", names[0]]


@dataclass(eq=False)
class RankMeshes:
    """Makes meshes, one for a layout and device type: process groups are few, and making them is collective."""

    _made: dict[tuple[Layout, str], RankMesh] = field(default_factory=dict)

    def of(self, layout: Layout, device: torch.device | str = "cpu") -> RankMesh:
        """The mesh; every rank asks for the same ones in the same order.

        Raises ConfigError where there is no process group, or its size is not that of the layout.
        """
        device = torch.device(device)
        key = (layout, device.type)
        if key not in self._made:
            self._made[key] = _make(layout, device)
        return self._made[key]


def _make(layout: Layout, device: torch.device) -> RankMesh:
    if not dist.is_initialized():
        raise ConfigError(
            f"a layout of {layout.size} ranks ({layout}) needs a process group, there is none",
            fix="start the ranks with a launcher that makes one, or use a layout of 1 rank",
        )
    world = dist.get_world_size()
    if layout.size != world:
        raise ConfigError(
            f"the layout has {layout.size} ranks ({layout}), the process group {world}",
            fix="make the product of the layout's sizes equal to the number of ranks",
        )
    mesh = init_device_mesh(device.type, layout.sizes, mesh_dim_names=AXES)
    merged: dict[tuple[str, ...], DeviceMesh] = {}
    for axes in (DATA_AXES, WHOLE_WEIGHT_AXES, SHARD_AXES):
        large = tuple(axis for axis in axes if getattr(layout, axis) > 1)
        if len(large) > 1 and large not in merged:
            merged[large] = mesh[large]._flatten("_".join(large))
    return RankMesh(layout, device, mesh, merged, init_device_mesh(device.type, (world,), mesh_dim_names=("everyone",)))
