"""The process in which a rule runs.  Torch-free, so that it starts at once; its main thread is the rule's.

It is told how to load the rule, says that it is ready, and answers one job after another until its pipe is closed.
Jobs and answers (`Columns`, `Outcome`) are pickled by the two ends of one run and come from nowhere else.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutelage.errors import TutelageError
from tutelage.rewards.calls import Columns, Manner, Outcome, failed, late, manner_of, read, read_all
from tutelage.rewards.loading import REWARD_RULE, load_rule

if TYPE_CHECKING:
    import asyncio

ORPHAN_SECONDS = 30.0
"""A process whose parent is gone ends itself at most this long after the deadline of its job."""


@dataclass(frozen=True)
class Order:
    """How to load the rule.  what: how messages call it."""

    spec: str
    folder: Path | None
    settings: dict[str, Any]
    what: str = REWARD_RULE


@dataclass(frozen=True)
class Job:
    """Responses to judge.  seconds: of each.  at_once: of an async rule on one response.  limit: of the whole job."""

    columns: Columns
    seconds: float
    at_once: int
    limit: float


@dataclass(frozen=True)
class Answer:
    """row: of the job, None: of all rows.  whole: why there are no outcomes for any row."""

    outcomes: tuple[Outcome, ...] = ()
    row: int | None = None
    whole: Outcome | None = None
    last: bool = True


@dataclass(frozen=True)
class Refusal:
    """The rule cannot be loaded."""

    what: str
    fix: str


class Worker:
    """Answers jobs.  runner: keeps the event loop of an async rule, and with it the rule's connections; else None."""

    def __init__(self, pipe: Connection, rule: Any, manner: Manner, runner: asyncio.Runner | None) -> None:
        self.pipe = pipe
        self.rule = rule
        self.manner = manner
        self.runner = runner

    def serve(self) -> None:
        while True:
            try:
                job: Job = self.pipe.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(job.limit + ORPHAN_SECONDS, exit=True)
            try:
                self.answer(job)
            except BrokenPipeError:
                return
            finally:
                faulthandler.cancel_dump_traceback_later()

    def answer(self, job: Job) -> None:
        if not self.manner.each:
            self.pipe.send(self.all_rows(job.columns))
        elif self.runner is not None:
            self.runner.run(self.every_row(job))
            self.pipe.send(Answer())
        else:
            positional, named = self.manner.arguments(job.columns)
            try:
                outcome = read(self.rule(*positional, **named))
            except Exception as error:
                outcome = failed(error)
            self.pipe.send(Answer((outcome,), row=0))

    def all_rows(self, columns: Columns) -> Answer:
        positional, named = self.manner.arguments(columns)
        try:
            result = self.rule(*positional, **named)
            result = self.runner.run(result) if self.runner is not None else result
        except Exception as error:
            return Answer(whole=failed(error))
        found = read_all(result, len(columns))
        return Answer(whole=Outcome(error=found)) if isinstance(found, str) else Answer(tuple(found))

    async def every_row(self, job: Job) -> None:
        import asyncio

        gate = asyncio.Semaphore(job.at_once)

        async def one(row: int) -> None:
            _, named = self.manner.arguments(job.columns, row)
            async with gate:
                timeout = asyncio.timeout(job.seconds)
                try:
                    async with timeout:
                        outcome = read(await self.rule(**named))
                except Exception as error:
                    outcome = late(job.seconds) if timeout.expired() else failed(error)
            self.pipe.send(Answer((outcome,), row=row, last=False))

        await asyncio.gather(*(one(row) for row in range(len(job.columns))))


def main(descriptor: int) -> None:
    """Serve on the pipe that was inherited as a file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    os.dup2(2, 1)  # what a rule prints must not be mistaken for output of the command
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # it is read when the process was ended, too
    pipe = Connection(descriptor)
    order: Order = pipe.recv()
    try:
        rule = load_rule(order.spec, order.folder, order.settings, order.what)
        manner = manner_of(rule, order.spec, order.what)
    except TutelageError as error:
        pipe.send(Refusal(error.what, error.fix))
        return
    pipe.send(manner)
    if not manner.asynchronous:
        Worker(pipe, rule, manner, None).serve()
        return
    import asyncio  # a third of the time that this process would take to start

    with asyncio.Runner() as runner:
        Worker(pipe, rule, manner, runner).serve()
