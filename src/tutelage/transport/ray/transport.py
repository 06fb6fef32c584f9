"""The transport `ray`: calls on a role run on all ranks of its pool, results stay where they were made.

The driver sends a call as soon as it is made, whether its arguments exist yet or not: the rows of the arguments are
read by the ranks, each of which works out the same plan and fetches its own rows.  So independent calls overlap, and
tensors that the driver does not compute on never pass through it.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from tutelage.config.cluster import ClusterConfig
from tutelage.errors import ClusterError, ConfigError, closest
from tutelage.layout import Dispatch, RoleBuilder, no_progress
from tutelage.transport.ray import rows, split
from tutelage.transport.ray.connect import Connection, connect
from tutelage.transport.ray.ledger import Call, Ledger
from tutelage.transport.ray.orders import make_orders
from tutelage.transport.ray.pending import RayPending, Source, source_of
from tutelage.transport.ray.pool import Pool, find_homes, make_pools, place, release, rendezvous, spawn
from tutelage.transport.ray.watch import Watch
from tutelage.transport.ray.wire import Task
from tutelage.transport.ray.worker import Hosted, Setup, fetched, joined


def no_event(kind: str, message: str) -> None:
    """Nobody listens."""


class RayHandle:
    """A role's public methods on all ranks of its pool, returning pending results at once."""

    def __init__(self, name: str, hosted: Hosted, submit: Callable[..., RayPending]) -> None:
        self._name = name
        self._hosted = hosted
        self._submit = submit

    def __getattr__(self, method: str) -> Callable[..., RayPending]:
        if method.startswith("_") or method not in self._hosted.methods:
            near = closest(method, self._hosted.methods)
            raise AttributeError(f"the {self._name} role has no method {method}.{near}")
        dispatch = self._hosted.dispatch[method]

        def call(*args: Any, **kwargs: Any) -> RayPending:
            return self._submit(self._name, method, dispatch, args, kwargs)

        return call


class RayTransport:
    """Pools of processes on a Ray cluster; see `ray_transport` for the arguments.

    driver_bytes  bytes of tensors that the driver sent as arguments or gathered.  (Ray carries results below 100 kB
                  inside its replies, through the memory of their owner; larger ones stay on their node.)
    Not for several threads at once.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        *,
        log_dir: Path | None = None,
        progress: Callable[[str, int, int], None] = no_progress,
        event: Callable[[str, str], None] | None = None,
    ) -> None:
        self.cluster = cluster
        self.progress = progress
        self.event = event or no_event
        self.driver_bytes = 0
        self.run = uuid.uuid4().hex[:12]
        self.watch = Watch(self.run, progress)
        if log_dir is not None:
            self.watch.keep_logs(log_dir)
        self.ledger = Ledger(cluster.call_timeout, self.watch.poll, self.watch.last_lines)
        self.pools: dict[str, Pool] = {}
        self.handles: dict[str, RayHandle] = {}
        self._hosts: dict[str, Pool] = {}
        self._numbers = itertools.count()
        self._connection: Connection | None = None
        self._builder: RoleBuilder | None = None

    # ---- starting and ending ----

    def start(self, builder: RoleBuilder, roles: tuple[str, ...]) -> tuple[dict[str, RayHandle], tuple[str, ...]]:
        """Place the pools, start their processes, build the roles in them: handles by role, and the builders' notes.

        Raises ClusterError where the cluster does not answer or a pool cannot be placed; what a builder raises.
        """
        self._builder = builder
        try:
            self._connection = connect(self.cluster)
            self.watch.environment = {} if self._connection.own else dict(self.cluster.runtime_env)
            self.pools = make_pools(self.cluster, roles)
            for done, pool in enumerate(self.pools.values()):
                self.progress("pools placed", done, len(self.pools))
                place(pool, self.cluster, fixed=self._connection.local)
            self.progress("pools placed", len(self.pools), len(self.pools))
            for pool in self.pools.values():
                spawn(pool, self.cluster, self.run, inherit=self._connection.own)
            builds = [(pool, *self._start(pool)) for pool in self.pools.values()]
            notes = [note for pool, call, refs in builds for note in self._host(pool, call, refs)]
        except BaseException:
            self.close()
            raise
        return dict(self.handles), tuple(dict.fromkeys(notes))

    def _start(self, pool: Pool) -> tuple[Call, list[Any]]:
        """The building of the roles of a pool, whose processes are coming up, as a call under way."""
        assert self._builder is not None
        find_homes(pool, self.cluster)
        for rank, home in enumerate(pool.homes):
            self.watch.add(pool.label(rank), home.node, f"{pool.label(rank)}@{pool.node(rank)}")
        port = rendezvous(pool, self.cluster)
        address, device = pool.homes[0].address, "cuda" if pool.gpu else "cpu"
        timeout = self.cluster.collective_timeout
        sent = [
            worker.build.remote(
                self._builder,
                tuple(pool.layouts),
                Setup(address, port, device, pool.layouts, timeout, self.watch.agent(home.node)),
            )
            for worker, home in zip(pool.workers, pool.homes, strict=True)
        ]
        call = Call(next(self._numbers), "build", pool, [report for _, report in sent], [])
        self.ledger.add(call)
        return call, [value for value, _ in sent]

    def _host(self, pool: Pool, call: Call, refs: list[Any]) -> list[str]:
        """Handles of a pool's roles once they are built; the notes of all its ranks."""
        self.ledger.wait([call])
        built = ray.get(refs)
        for name, hosted in built[0][1].items():
            self._hosts[name] = pool
            self.handles[name] = RayHandle(name, hosted, self._submit)
        return [note for notes, _ in built for note in notes]

    def restart(self, pool_name: str, /) -> tuple[str, ...]:
        """Replace all processes of a pool, on a new placement, and build its roles again: the builders' notes.

        The roles are as the builder makes them: load their state from a checkpoint next.  Results that lay in the
        pool are gone; handles stay valid.  Raises ClusterError where there is no room for the pool any more.
        """
        pool = self.pools[pool_name]
        cause = pool.lost or ClusterError(f"pool {pool_name} was started again while calls were under way")
        self.ledger.forget(pool, cause)
        self.watch.drain()
        release(pool)
        assert self._connection is not None
        pool.generation += 1
        place(pool, self.cluster, fixed=False)
        spawn(pool, self.cluster, self.run, inherit=self._connection.own)
        call, refs = self._start(pool)
        notes = self._host(pool, call, refs)
        pool.lost, pool.told = None, False
        nodes = sorted({pool.node(rank) for rank in range(pool.size)})
        self.event("restart", f"pool {pool_name}: {pool.size} ranks started again on {', '.join(nodes)}")
        return tuple(dict.fromkeys(notes))

    def places(self) -> tuple[str, ...]:
        """Where the ranks of each pool run, a sentence a pool."""
        return tuple(pool.places() for pool in self.pools.values())

    def lost(self) -> tuple[str, ...]:
        """Pools that take no calls until `restart`."""
        return tuple(name for name, pool in self.pools.items() if pool.lost is not None)

    def close(self) -> None:
        """End all processes; a Ray instance that this transport did not start goes on.  May be called twice."""
        if self._connection is None:
            return
        if not ray.is_initialized():  # somebody else ended the connection, and all processes with it
            self._connection = None
            return
        self.ledger.poll(0)
        for call in self.ledger.open:
            again = call.pool.told and isinstance(call.failure, ClusterError)  # of a loss that was told
            if call.settled and call.failure is not None and not call.announced and not again:
                self.event("error", f"{call.name} failed and nobody waited for it: {call.failure}")
        self.watch.close()
        for pool in self.pools.values():
            release(pool)
        self.pools, self.handles, self._hosts, self.ledger.open = {}, {}, {}, []
        self._connection.close()
        self._connection = None

    def attach(self, folder: Path) -> None:
        """The run folder: every node must see it (ClusterError), and workers.log is kept in it."""
        self.require_shared(folder)
        self.keep_logs(folder)

    def keep_logs(self, log_dir: Path) -> None:
        """Write the output of every rank to workers.log in this folder, from the start of the ranks on."""
        self.watch.keep_logs(log_dir)

    def require_shared(self, folder: Path) -> None:
        """Raises ClusterError, naming the nodes, where a folder of the driver is not seen by all nodes of the run."""
        probe, content = folder / f".seen-by-all-{self.run}", uuid.uuid4().hex
        probe.write_text(content)
        try:
            blind = self.watch.sees(str(probe.resolve()), content, self.cluster.start_timeout)
        except (RayError, GetTimeoutError) as error:
            raise ClusterError(f"a node did not say whether it sees {folder}: {error}", fix="see ray status") from error
        finally:
            probe.unlink(missing_ok=True)
        if blind:
            raise ClusterError(
                f"{folder} is not the same folder on every node ({'; '.join(blind)})",
                fix="set output_dir to a path that all nodes share, such as NFS, Lustre or a mounted bucket",
            )

    # ---- calls ----

    def handle(self, name: str, role: Any = None) -> RayHandle:
        """The handle of a started role; a role object of the driver is not used."""
        if name not in self.handles:
            raise ConfigError(f"{name} is not a role of this run.{closest(name, self.handles)}")
        return self.handles[name]

    def put(self, value: Any) -> RayPending:
        return RayPending(Source(value=value), "the controller", self._gathered)

    def call(self, function: Callable[..., Any], *args: Any, outputs: int = 1) -> tuple[RayPending, ...]:
        """Controller mathematics: runs here, on gathered values."""
        name = getattr(function, "__name__", "function")
        values = [self._gathered(source_of(argument)) for argument in args]
        start = time.perf_counter()
        result = function(*values)
        key = ("controller", name)
        self.ledger.seconds[key] = self.ledger.seconds.get(key, 0.0) + time.perf_counter() - start
        results = (result,) if outputs == 1 else tuple(result)
        assert len(results) == outputs, f"{name} returned {len(results)} results, {outputs} were declared"
        return tuple(RayPending(Source(value=v), f"controller.{name}", self._gathered) for v in results)

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """Seconds of the slowest rank by (role, method), of calls that ended since the last question."""
        self.ledger.poll(0)
        return self.ledger.take_seconds()

    def take_busy(self) -> dict[str, float]:
        """Seconds that each pool worked, fetching of arguments included, since the last question."""
        self.ledger.poll(0)
        return self.ledger.take_busy()

    def _submit(
        self, role: str, method: str, dispatch: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RayPending:
        pool, name = self._hosts[role], f"{role}.{method}"
        if pool.lost is not None:
            raise pool.lost
        layout = pool.layouts[role]
        sources = [source_of(argument) for argument in (*args, *kwargs.values())]
        orders = make_orders(name, dispatch, layout, sources, len(args), tuple(kwargs), self._sent)
        number = next(self._numbers)
        sent = [
            worker.call.remote(Task(number, role, method, dispatch, orders.planned, part), payload, *orders.reports)
            for worker, (payload, part) in zip(pool.workers, orders.by_rank, strict=True)
        ]
        upstream = list(dict.fromkeys(call for source in sources for call in source.calls()))
        call = Call(number, name, pool, [report for _, report in sent], upstream, (role, method))
        self.ledger.add(call)
        ranks = tuple(rank for rank in range(pool.size) if split.replies(dispatch, layout, rank))
        source = Source(call, None, tuple(sent[rank][0] for rank in ranks), ranks, dispatch is Dispatch.EACH)
        return RayPending(source, name, self._gathered)

    def _sent(self, payload: Any) -> Any:
        """Arguments as they travel: those with tensors once, by reference, however many ranks read them."""
        size = rows.tensor_bytes(payload)
        self.driver_bytes += size
        return ray.put(rows.on_cpu(payload)) if size else payload

    def _gathered(self, source: Source) -> Any:
        calls = list(dict.fromkeys(source.calls()))
        if calls:
            self.ledger.wait(calls)
        return self._value(source)

    def _value(self, source: Source) -> Any:
        if source.call is None:
            value = source.value
        else:
            told = [source.call.told[rank] for rank in source.ranks]
            value = joined(list(source.refs), told, source.each, None, self._fetch)
        if not source.columns:
            return value
        return value.adding(**{name: self._value(column) for name, column in source.columns.items()})

    def _fetch(self, refs: list[Any]) -> list[Any]:
        values = fetched(refs)
        self.driver_bytes += rows.tensor_bytes(values)
        return values
