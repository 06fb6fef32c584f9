"""Schema of the `cluster` section: where the roles run, and how their ranks are arranged.

Torch-free.  With `transport: local` everything runs in one process and no other key has an effect.
"""

from __future__ import annotations

from typing import Any, Literal

from tutelage.config.schema import OnlyIf, Schema, setting
from tutelage.layout import Layout

RAY = OnlyIf("cluster.transport is ray", lambda c: c.cluster.transport == "ray")
MAIN = "main"


class PoolConfig(Schema):
    devices: int = setting(1, "Processes of the pool, one a device.", ge=1)
    kind: Literal["auto", "cpu", "gpu"] = setting("auto", "auto: gpu where the cluster has any, else cpu.")
    per_device: float = setting(
        1.0, "Share of a GPU (CPU core for cpu pools) that each process reserves; below 1 pools can overlap.", gt=0
    )
    cores: float = setting(1.0, "CPU cores each process of a gpu pool reserves.", gt=0)
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = setting(
        "PACK", "Over nodes: PACK few, SPREAD many; STRICT refuses what the cluster cannot give."
    )


class LayoutConfig(Schema):
    replicate: int | None = setting(None, "Replicas of the sharded model; default: what the other axes leave.", ge=1)
    shard: int = setting(1, "FSDP: every weight is cut over this many ranks.", ge=1)
    context: int = setting(1, "Context parallel: a row is cut, keys and values are gathered.", ge=1)
    sequence: int = setting(1, "Ulysses: a row is cut, heads and tokens change places for attention.", ge=1)
    tensor: int = setting(1, "Tensor parallel: every matrix is cut.", ge=1)
    pipeline: int = setting(1, "Pipeline stages: the blocks are cut.", ge=1)
    pipeline_schedule: Literal["1f1b", "gpipe"] = setting("1f1b", "Order of micro-batches through pipeline stages.")
    offload: bool = setting(False, "Weights, gradients and optimiser rest in the host's memory (needs a GPU).")


class ClusterConfig(Schema):
    transport: Literal["local", "ray"] = setting("local", "local: one process; ray: groups of processes.")
    address: str | None = setting(
        None, "Ray cluster (auto, HOST:PORT or ray://HOST:PORT); default: an instance on this machine.", only_if=RAY
    )
    pools: dict[str, PoolConfig] = setting(
        lambda: {MAIN: PoolConfig()}, "Groups of devices by name; the first takes every role not placed.", only_if=RAY
    )
    place: dict[str, str] = setting(dict, "Role -> pool; roles in one pool share its processes.", only_if=RAY)
    layout: dict[str, LayoutConfig] = setting(
        dict, "Role -> arrangement of its ranks; the name default is for every other role.", only_if=RAY
    )
    start_timeout: float = setting(30.0, "Seconds to wait for pools to be placed.", gt=0, only_if=RAY)
    collective_timeout: float = setting(600.0, "Seconds until a collective gives up.", gt=0, only_if=RAY)
    call_timeout: float = setting(3600.0, "Seconds until a call on a role gives up.", gt=0, only_if=RAY)
    restarts: int = setting(
        0, "Times that a lost role group is started again from the last checkpoint.", ge=0, only_if=RAY
    )
    runtime_env: dict[str, Any] = setting(
        dict, "Ray runtime environment of the workers (working_dir, pip, env_vars...).", only_if=RAY
    )

    def pool_of(self, role: str) -> str:
        """The pool a role runs in."""
        return self.place.get(role, next(iter(self.pools), MAIN))

    def settings_of(self, role: str) -> LayoutConfig:
        """What the recipe says of a role's ranks."""
        return self.layout.get(role) or self.layout.get("default") or LayoutConfig()

    def layout_of(self, role: str) -> Layout:
        """The role's layout, `replicate` filled up to the devices of its pool; sizes are checked by `config.checks`."""
        sizes = self.settings_of(role).model_dump(exclude={"pipeline_schedule", "offload"})
        replicate = sizes.pop("replicate")
        rest = Layout(**sizes).size
        devices = self.pools[self.pool_of(role)].devices if self.transport == "ray" else rest
        return Layout(replicate=replicate or max(devices // rest, 1), **sizes)
