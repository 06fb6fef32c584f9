"""A pool: placement on the cluster, one process a device, a process group, and the roles built on it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tutelage.config.cluster import ClusterConfig, PoolConfig
from tutelage.errors import ClusterError, ConfigError
from tutelage.layout import Layout
from tutelage.transport.ray import nodes
from tutelage.transport.ray.worker import Home, Worker

PROCESS_START = 10.0
"""Times `start_timeout` that processes may take to come up: a runtime environment may install packages first."""


@dataclass(eq=False)
class Pool:
    """A group of ranks with the roles they host.

    lost  the error that says which rank is gone; a pool that lost a rank takes no calls until it is started again.
    told  whether the driver was told of it.
    """

    name: str
    config: PoolConfig
    layouts: dict[str, Layout]
    gpu: bool
    generation: int = 0
    group: PlacementGroup | None = None
    workers: list[Any] = field(default_factory=list)
    homes: list[Home] = field(default_factory=list)
    lost: ClusterError | None = None
    told: bool = False

    @property
    def size(self) -> int:
        return self.config.devices

    def label(self, rank: int) -> str:
        """Names a rank's log: pool and rank, and how often the pool was started again."""
        return f"{self.name} {rank}" + (f" restart {self.generation}" if self.generation else "")

    def node(self, rank: int) -> str:
        return nodes.node_name(self.homes[rank].node, self.homes[rank].address) if self.homes else "a node"

    def where(self, rank: int) -> str:
        return f"rank {rank} of pool {self.name} on {self.node(rank)}"

    def places(self) -> str:
        """`pool main: ranks 0, 1 on 10.0.0.1#3fa2c1; rank 2 on 10.0.0.2#77b0e4`."""
        ranks: dict[str, list[str]] = {}
        for rank in range(self.size):
            ranks.setdefault(self.node(rank), []).append(str(rank))
        told = [f"rank{'s' if len(own) > 1 else ''} {', '.join(own)} on {node}" for node, own in ranks.items()]
        return f"pool {self.name}: {'; '.join(told)}"

    def bundle(self) -> dict[str, float]:
        """What one process reserves."""
        if self.gpu:
            return {"GPU": self.config.per_device, "CPU": self.config.cores}
        return {"CPU": self.config.per_device}

    def threads(self) -> int:
        return max(1, int(self.config.cores if self.gpu else self.config.per_device))


def make_pools(cluster: ClusterConfig, roles: Sequence[str]) -> dict[str, Pool]:
    """The pools that have roles, in the order of the recipe.

    Raises ConfigError for a layout whose ranks are not the devices of its pool, and for an unknown pool.
    """
    members: dict[str, dict[str, Layout]] = {}
    for role in roles:
        name = cluster.pool_of(role)
        if name not in cluster.pools:
            raise ConfigError(f"cluster.place.{role} is {name}", fix=f"the pools are {', '.join(cluster.pools)}")
        layout, devices = cluster.layout_of(role), cluster.pools[name].devices
        if layout.size != devices:
            raise ConfigError(
                f"the layout of {role} ({layout}) has {layout.size} ranks, its pool {name} has {devices} devices",
                fix=f"make the product of cluster.layout.{role} {devices}, or set cluster.pools.{name}.devices "
                f"to {layout.size}",
            )
        members.setdefault(name, {})[role] = layout
    with_gpus = nodes.has_gpus()
    return {
        name: Pool(name, config, members[name], config.kind == "gpu" or (config.kind == "auto" and with_gpus))
        for name, config in cluster.pools.items()
        if name in members
    }


def place(pool: Pool, cluster: ClusterConfig, *, fixed: bool) -> None:
    """Reserve the pool's resources within `start_timeout`; at once refused where the cluster is `fixed` and too small.

    Raises ClusterError with what was asked for and what exists.
    """
    if fixed:
        require_room(pool)
    bundles = [pool.bundle() for _ in range(pool.size)]
    pool.group = placement_group(bundles, strategy=pool.config.strategy)
    if not pool.group.wait(timeout_seconds=cluster.start_timeout):
        error = no_room(pool, f"not placed within {cluster.start_timeout:g} s (cluster.start_timeout)")
        release(pool)
        raise error


def require_room(pool: Pool) -> None:
    """For a cluster that cannot grow: raises ClusterError where a pool does not fit what is free."""
    free = nodes.free_by_node()
    if not free:
        return
    fits = {
        node: min(int(left.get(kind, 0) / amount + 1e-9) for kind, amount in pool.bundle().items())
        for node, left in free.items()
    }
    strategy = pool.config.strategy
    most = {"STRICT_PACK": max(fits.values()), "STRICT_SPREAD": sum(count > 0 for count in fits.values())}
    room = most.get(strategy, sum(fits.values()))
    if room < pool.size:
        raise no_room(pool, f"room for {room}")


def no_room(pool: Pool, seen: str) -> ClusterError:
    each = ", ".join(f"{kind} {amount:g}" for kind, amount in pool.bundle().items())
    count = len(nodes.alive())
    return ClusterError(
        f"pool {pool.name} asks for {pool.size} x ({each}), strategy {pool.config.strategy}: {seen}; the cluster has "
        f"{count} node{'s' if count != 1 else ''}: {nodes.described()}",
        fix=f"lower cluster.pools.{pool.name}.devices or per_device, choose another strategy, or add nodes",
    )


def spawn(pool: Pool, cluster: ClusterConfig, run: str, *, inherit: bool) -> None:
    """One actor a bundle; they come up while others do.

    inherit: the runtime environment came with the connection, only the processes' own variables are added.
    """
    own = {"OMP_NUM_THREADS": str(pool.threads()), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {} if inherit else dict(cluster.runtime_env)
    environment["env_vars"] = {**own, **cluster.runtime_env.get("env_vars", {})}
    assert pool.group is not None, "a pool is placed before its workers start"
    kind = ray.remote(Worker)
    pool.homes = []
    pool.workers = [
        kind.options(
            num_cpus=pool.bundle()["CPU"],
            num_gpus=pool.bundle().get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(pool.group, placement_group_bundle_index=rank),
            runtime_env=environment,
            max_restarts=0,
        ).remote(run, pool.label(rank), rank, pool.size)
        for rank in range(pool.size)
    ]


def find_homes(pool: Pool, cluster: ClusterConfig) -> None:
    """Where each rank runs, once it is up.  Raises ClusterError for two ranks of the pool on one GPU."""
    limit = PROCESS_START * cluster.start_timeout
    pool.homes = answers(pool, [worker.home.remote() for worker in pool.workers], limit)
    shared = [key for key, count in Counter((h.node, gpu) for h in pool.homes for gpu in h.gpus).items() if count > 1]
    if shared:
        raise ClusterError(
            f"{len(shared)} GPUs are shared by several ranks of pool {pool.name}, which NCCL refuses",
            fix=f"lower cluster.pools.{pool.name}.devices, set strategy SPREAD, or give each rank more than half a GPU",
        )


def rendezvous(pool: Pool, cluster: ClusterConfig) -> int:
    """The port of the pool's store on the node of rank 0; 0 where one rank needs none: sharding, also over one rank
    (offload), is done over a process group."""
    if pool.size == 1 and not any(cluster.settings_of(role).offload for role in pool.layouts):
        return 0
    asked = pool.workers[0].serve_store.remote(pool.homes[0].address, cluster.collective_timeout)
    (port,) = answers(pool, [asked], PROCESS_START * cluster.start_timeout)
    return int(port)


def answers(pool: Pool, asked: list[Any], seconds: float) -> list[Any]:
    """The replies of processes that start.  Raises ClusterError for one that does not come up."""
    try:
        return list(ray.get(asked, timeout=seconds))
    except GetTimeoutError as error:
        ready = len(ray.wait(asked, num_returns=len(asked), timeout=0)[0])
        raise ClusterError(
            f"{len(asked) - ready} of {len(asked)} processes of pool {pool.name} did not start within {seconds:g} s",
            fix="raise cluster.start_timeout; a runtime environment with packages takes long the first time",
        ) from error
    except RuntimeEnvSetupError as error:
        raise ClusterError(
            f"the runtime environment of pool {pool.name} cannot be made: {error}", fix="correct cluster.runtime_env"
        ) from error
    except (RayActorError, RayTaskError, RayError) as error:
        raise ClusterError(
            f"a process of pool {pool.name} did not start: {error}",
            fix="the nodes need the same Python, torch and tutelage as this one; see cluster.runtime_env",
        ) from error


def release(pool: Pool) -> None:
    """End the processes of a pool and give back what it reserved."""
    for worker in pool.workers:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(worker)
    pool.workers = []
    if pool.group is not None:
        with contextlib.suppress(RayError, ValueError):
            remove_placement_group(pool.group)
    pool.group = None
