"""One rank of a pool: a process with a torch process group of its own that hosts all roles of the pool.

Shapes: B rows of a call, b rows of this rank's part.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from tutelage.errors import ClusterError, ShapeError
from tutelage.layout import Built, Dispatch, Layout, Place, RoleBuilder, dispatch_of
from tutelage.sharing import shares
from tutelage.transport.metering import TAKE, Measured, Meter
from tutelage.transport.ray import rows, split
from tutelage.transport.ray.agent import Progress, log_path
from tutelage.transport.ray.rows import Rows
from tutelage.transport.ray.split import Part
from tutelage.transport.ray.wire import Failure, Given, Parts, Report, Task

REPORT_EVERY = 0.2


@dataclass(frozen=True)
class Home:
    """Where a rank runs."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Hosted:
    """What the driver must know of a built role: its public methods and how each is dispatched."""

    methods: frozenset[str]
    dispatch: dict[str, Dispatch]


def hosted(role: object) -> Hosted:
    """`DISPATCH` of a role's class maps methods to protocols; a method that is not named is ALL.

    Besides its own methods every role answers `take_measured`, rank by rank (`transport.metering`).
    """
    methods = [n for n in dir(role) if not n.startswith("_") and callable(getattr(type(role), n, None))]
    dispatch = {name: dispatch_of(role, name) for name in methods}
    return Hosted(frozenset([*methods, TAKE]), {**dispatch, TAKE: Dispatch.EACH})


class Worker:
    """Every public method runs in the actor's main thread, one after the other, in the order of the driver's calls."""

    def __init__(self, run: str, label: str, rank: int, world: int) -> None:
        self.label, self.rank, self.world = label, rank, world
        self.roles: dict[str, object] = {}
        self.place = Place(rank, world)
        self.meter: Meter  # from `build` on, when everything is imported
        self.agent: Any = None
        self.store: Any = None
        self.call_id = -1
        self.reported = 0.0
        _redirect(str(log_path(run, label)))

    def home(self) -> Home:
        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return Home(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), gpus)

    def serve_store(self, address: str, seconds: float) -> int:
        """Rank 0: the rendezvous of the pool, on a port that the system chose."""
        timeout = timedelta(seconds=seconds)
        self.store = torch.distributed.TCPStore(
            address, 0, self.world, is_master=True, timeout=timeout, wait_for_workers=False
        )
        return int(self.store.port)

    @ray.method(num_returns=2)
    def build(self, builder: RoleBuilder, names: tuple[str, ...], setup: Setup) -> tuple[Any, Report]:
        """Join the process group, then build the roles: (notes, {role: Hosted})."""
        started = time.perf_counter()
        try:
            self.agent = setup.agent
            self._join(setup)
            self.place = Place(self.rank, self.world, setup.device, setup.layouts, self._progress, setup.address)
            self.meter = Meter(self.label, setup.device)
            built: Built = builder(names, self.place)
            self.roles = dict(built.roles)
            found = {name: hosted(role) for name, role in self.roles.items()}
            return (tuple(built.notes), found), Report(seconds=time.perf_counter() - started)
        except Exception as error:
            return None, Report(failure=Failure.of(error, time.time()))

    def _join(self, setup: Setup) -> None:
        if setup.device == "cuda":
            if not torch.cuda.is_available():
                raise ClusterError(
                    f"{self.label} has a GPU of Ray's, but torch {torch.__version__} sees none",
                    fix="install a CUDA build of torch on the nodes, or set the pool's kind to cpu",
                )
            torch.cuda.set_device(0)
        if setup.port == 0:
            return
        timeout = timedelta(seconds=setup.collective_timeout)
        if self.store is None:
            self.store = torch.distributed.TCPStore(
                setup.address, setup.port, self.world, is_master=False, timeout=timeout, wait_for_workers=False
            )
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.world,
            timeout=timeout,
        )

    @ray.method(num_returns=2)
    def call(self, task: Task, payload: Any, *reports: Report) -> tuple[Any, Report]:
        """(reply, report); the reply is None on ranks that do not reply."""
        started = time.perf_counter()
        self.call_id = task.id
        try:
            if any(report.failure is not None or report.skipped for report in reports):
                return None, Report(skipped=True)
            layout = self.place.layout(task.role)
            args, kwargs, part = self._arguments(task, layout, payload, reports)
            begun = time.perf_counter()
            value = self._run(task, layout, part, args, kwargs)
            seconds = time.perf_counter() - begun
            reply, kept, places = self._reply(task, layout, part, rows.on_cpu(value))
            busy = time.perf_counter() - started
            return reply, Report(kept, places, seconds, busy)
        except Exception as error:
            return None, Report(busy=time.perf_counter() - started, failure=Failure.of(error, time.time()))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _run(self, task: Task, layout: Layout, part: Part | None, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The method itself, measured; of rows that peers share, each counts its part of the tokens."""
        if task.method == TAKE:
            return self._measured(task.role)
        share = 0.0 if part is not None and part.filler else split.parts_of(task.dispatch, layout) / layout.size
        with self.meter.phase(task.role, task.method, share) as running:
            value = getattr(self.roles[task.role], task.method)(*args, **kwargs)
            running.saw((value, *args))
        return value

    def _measured(self, role: str) -> Measured:
        """What the calls of a role took in this process since the last question."""
        return self.meter.take(role, self.roles)

    def _reply(self, task: Task, layout: Layout, part: Part | None, value: Any) -> tuple[Any, Rows | None, Any]:
        """What is sent back: the value, its rows, and their places in the whole result."""
        if not split.replies(task.dispatch, layout, self.rank):
            return None, None, None
        if part is None:
            return value, rows.rows_of(value), None
        places = split.reply_places(task.name, task.dispatch, part, value)
        if part.filler:
            return None, None, places
        if task.dispatch is Dispatch.GENERATE:
            value = split.with_global_groups(value, part)
        return value, rows.reply_rows(value), places

    # ---- arguments ----

    def _arguments(
        self, task: Task, layout: Layout, payload: Any, reports: tuple[Report, ...]
    ) -> tuple[list[Any], dict[str, Any], Part | None]:
        args, kwargs = payload
        if task.planned:
            return list(args), dict(kwargs), task.part
        given = [*args, *kwargs.values()]
        mine = split.part_of(task.dispatch, layout, self.rank)
        count = split.parts_of(task.dispatch, layout)
        part = None
        if task.dispatch in (Dispatch.ROWS, Dispatch.GENERATE):
            plan = split.row_plan(task.name, [known_rows(argument, reports) for argument in given], count)
            part = plan.parts[mine]
            values = [
                resolved(argument, reports, part.index if cut else None)
                for argument, cut in zip(given, plan.split, strict=True)
            ]
        elif task.dispatch is Dispatch.EACH:
            values = [entry_of(argument, reports, self.rank) for argument in given]
        else:
            values = [resolved(argument, reports, None) for argument in given]
        if task.dispatch is Dispatch.MINIBATCH:
            values[0] = shares(values[0], values[1], count)[mine]
        return values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True)), part

    def _progress(self, what: str, done: int, total: int) -> None:
        """Sent on at most every fifth of a second, and always at the end."""
        clock = time.monotonic()
        if self.agent is not None and (done >= total or clock - self.reported >= REPORT_EVERY):
            self.reported = clock
            self.agent.report.remote(self.label, Progress(self.call_id, what, done, total))


@dataclass(frozen=True)
class Setup:
    """What every rank of a pool is told before its roles are built; port 0: the pool needs no process group."""

    address: str
    port: int
    device: str
    layouts: dict[str, Layout]
    collective_timeout: float
    agent: Any


def known_rows(argument: Given | Parts, reports: tuple[Report, ...]) -> Rows | None:
    """The rows of an argument, of an earlier result from its reports alone."""
    if isinstance(argument, Given):
        return rows.rows_of(argument.value)
    told = [reports[number] for number in argument.reports]
    if argument.each:
        return None
    held = [(r.rows, r.places) for r in told if r.rows is not None and r.places is not None]
    if not held:
        return told[0].rows
    tokens_B = torch.cat([found.tokens for found, _ in held])
    place_B = torch.cat([places for _, places in held])
    return Rows(tokens_B[torch.argsort(place_B)], held[0][0].batch, held[0][0].pairs)


def resolved(argument: Given | Parts, reports: tuple[Report, ...], wanted_b: torch.Tensor | None) -> Any:
    """The value of an argument, or rows `wanted_b` of it."""
    if isinstance(argument, Given):
        value = argument.value if wanted_b is None else rows.select(argument.value, wanted_b)
    else:
        told = [reports[number] for number in argument.reports]
        value = joined(argument.refs, told, argument.each, wanted_b, fetched)
    if not argument.columns:
        return value
    base, whole = known_rows(argument, reports), rows.whole_columns(value)
    columns = {
        name: resolved(column, reports, None) if name in whole else _column(name, column, reports, base, wanted_b)
        for name, column in argument.columns.items()
    }
    return value.adding(**columns)


def _column(
    name: str, column: Given | Parts, reports: tuple[Report, ...], base: Rows | None, wanted_b: torch.Tensor | None
) -> Any:
    """A column for a batch of rows `base`, cut as the batch is; a value without rows stays whole."""
    found = rows.reply_rows(column.value) if isinstance(column, Given) else known_rows(column, reports)
    if found is None:
        return resolved(column, reports, None)
    if base is not None and len(found) != len(base):
        raise ShapeError(f"column {name} has {len(found)} rows, the batch has {len(base)}")
    return resolved(column, reports, wanted_b)


def fetched(refs: list[Any]) -> list[Any]:
    """Values of other ranks.  Raises ClusterError for one whose node is gone."""
    try:
        return list(ray.get(refs))
    except RayError as error:
        raise ClusterError(
            f"an argument cannot be fetched: {str(error).splitlines()[0]}",
            fix="the node that held it is gone; resume from the last checkpoint",
        ) from error


def entry_of(argument: Given | Parts, reports: tuple[Report, ...], rank: int) -> Any:
    """One rank's entry of a list with one entry a rank; of a result of EACH, without fetching the others."""
    if isinstance(argument, Parts) and argument.each:
        return fetched([argument.refs[rank]])[0]
    return resolved(argument, reports, None)[rank]


def joined(
    refs: list[Any],
    told: list[Report],
    each: bool,
    wanted_b: torch.Tensor | None,
    fetch: Callable[[list[Any]], list[Any]],
) -> Any:
    """The value of a result that lies in parts, or rows `wanted_b` of it."""
    if each:
        return fetch(refs)
    unplaced = [report for report in told if report.places is None]
    if unplaced and len(unplaced) < len(told):
        raise ShapeError(f"{len(unplaced)} of {len(told)} ranks replied with None, the others with rows")
    if unplaced:  # not split, or every rank replied with None
        (value,) = fetch(refs[:1])
        return value if wanted_b is None else rows.select(value, wanted_b)
    places = [report.places for report in told if report.rows is not None]
    held = [ref for ref, report in zip(refs, told, strict=True) if report.rows is not None]
    return rows.assemble(lambda parts: fetch([held[p] for p in parts]), [p for p in places if p is not None], wanted_b)


def _redirect(path: str) -> None:
    """Everything this process writes, C libraries included, goes to one file in the order it was written."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    faulthandler.enable(file=2)
