"""A rule in processes of its own: what hangs is ended, whatever it does, and nothing waits without a deadline.

A thread could not be ended, and sympy, regular expressions and other C code may hold the interpreter for ever.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from tutelage.errors import RewardError
from tutelage.rewards.calls import Columns, Manner, Outcome, late
from tutelage.rewards.worker import Answer, Job, Order, Refusal

START_SECONDS = 300.0
"""A rule may take this long to be imported."""
GRACE_SECONDS = 1.0
"""What an async rule has besides its deadlines, to be cancelled and to answer."""
AT_ONCE = 32
"""Responses of an async rule in flight where the recipe does not say."""


class LateError(Exception):
    """No answer within the deadline."""


class DeadError(Exception):
    """The process ended by itself."""


class RuleProcess:
    """One process with the rule in it.  Raises RewardError where the rule cannot be loaded there."""

    def __init__(self, order: Order) -> None:
        self.spec = order.spec
        ours, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from tutelage.rewards.worker import main; main({theirs.fileno()})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.pipe: Connection = ours
        self.close = weakref.finalize(self, _end, self.process, ours)
        try:
            self.send(order)
            said = self.receive(time.monotonic() + START_SECONDS)
        except (LateError, DeadError) as error:
            self.close()
            what = f"took more than {START_SECONDS:g} s" if isinstance(error, LateError) else str(error)
            raise RewardError(
                f"the process of {order.what} {self.spec} did not start: {what}", fix="import its module by hand"
            ) from error
        if isinstance(said, Refusal):
            self.close()
            raise RewardError(said.what, fix=said.fix)
        self.manner: Manner = said

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError as error:
            raise DeadError(self.last_words()) from error

    def receive(self, deadline: float) -> Any:
        """The next message.  Raises LateError at `deadline` (monotonic seconds) and DeadError."""
        try:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise LateError
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise DeadError(self.last_words()) from error

    def last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        return f"its process ended with exit code {self.process.poll()}"


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()


class RuleProcesses:
    """Judges responses in up to `concurrency` processes (an async rule: in one, `concurrency` at a time).

    seconds  of each response; a call on N responses has N times that.
    Processes start with the first call and after one was ended.  One outcome per response, in their order.
    """

    def __init__(self, order: Order, seconds: float, concurrency: int | None) -> None:
        self.order = order
        self.seconds = seconds
        self.concurrency = concurrency
        self.idle: list[RuleProcess] = []

    def judge(self, columns: Columns, *, all_errors: bool) -> list[Outcome]:
        """all_errors: False stops looking for more rows that fail once one is found.

        Raises RewardError for what is wrong with a whole call and with no response alone.
        """
        if not len(columns):
            return []
        process = self.take()
        manner = process.manner
        self.idle.append(process)
        if not manner.each:
            return self.all_rows(columns, all_errors)
        if manner.asynchronous:
            return self.in_flight(columns)
        return self.one_by_one(columns)

    def take(self) -> RuleProcess:
        """A process that waits for work, or a new one."""
        while self.idle:
            process = self.idle.pop()
            if process.process.poll() is None:
                return process
            process.close()
        return RuleProcess(self.order)

    def close(self) -> None:
        """End every process; the next call starts one again."""
        while self.idle:
            self.idle.pop().close()

    def job(self, columns: Columns, limit: float) -> Job:
        return Job(columns, self.seconds, self.concurrency or AT_ONCE, limit)

    def one_by_one(self, columns: Columns) -> list[Outcome]:
        """A response a call, in as many processes as may work at once."""
        outcomes = [Outcome()] * len(columns)
        waiting = deque(range(len(columns)))
        busy: dict[Connection, tuple[RuleProcess, int, float]] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < (self.concurrency or 1):
                    row, process = waiting.popleft(), self.take()
                    try:
                        process.send(self.job(columns.select([row]), self.seconds))
                    except DeadError as error:  # it died between two jobs: this row has not been tried
                        process.close()
                        outcomes[row] = dead(error)
                        continue
                    busy[process.pipe] = (process, row, time.monotonic() + self.seconds)
                first = min((end for _, _, end in busy.values()), default=0.0)
                ready = set(wait(list(busy), max(0.0, first - time.monotonic()))) if busy else set()
                moment = time.monotonic()
                for pipe, (process, row, end) in list(busy.items()):
                    if pipe not in ready and end > moment:
                        continue
                    del busy[pipe]
                    outcomes[row] = self.finished(process, end)
        finally:
            for process, _, _ in busy.values():
                process.close()
        return outcomes

    def finished(self, process: RuleProcess, end: float) -> Outcome:
        """The outcome of a process that answered, died, or is late and is ended."""
        try:
            answer: Answer = process.receive(end)
        except LateError:
            process.close()
            return late(self.seconds)
        except DeadError as error:
            process.close()
            return dead(error)
        self.idle.append(process)
        return answer.outcomes[0]

    def in_flight(self, columns: Columns) -> list[Outcome]:
        """An async rule on one response.  Those that a blocked process did not answer are tried alone."""
        found: dict[int, Outcome] = {}
        rounds = -(-len(columns) // (self.concurrency or AT_ONCE))
        self.stream(columns, rounds * self.seconds + GRACE_SECONDS, found)
        for row in range(len(columns)):
            if row not in found:
                alone: dict[int, Outcome] = {}
                ended = self.stream(columns.select([row]), self.seconds + GRACE_SECONDS, alone)
                found[row] = alone.get(0) or ended or late(self.seconds)
        return [found[row] for row in range(len(columns))]

    def stream(self, columns: Columns, limit: float, found: dict[int, Outcome]) -> Outcome | None:
        """Fill `found` with what is answered in time; what ended the process, if anything did."""
        process = self.take()
        end = time.monotonic() + limit
        try:
            process.send(self.job(columns, limit))
            while not (answer := process.receive(end)).last:
                found[answer.row] = answer.outcomes[0]
        except LateError:
            process.close()
            return late(self.seconds)
        except DeadError as error:
            process.close()
            return dead(error)
        self.idle.append(process)
        return None

    def all_rows(self, columns: Columns, all_errors: bool) -> list[Outcome]:
        """One call on all responses.  Where it fails, each is tried alone; those that do not fail go together again."""
        answer = self.ask(columns)
        if answer.whole is None:
            return list(answer.outcomes)
        if answer.whole.error.startswith("returned"):
            raise self.whole_error(answer.whole, len(columns))
        bad: dict[int, Outcome] = {}
        for row in range(len(columns)):
            alone = self.ask(columns.select([row]))
            wrong = alone.whole or next((outcome for outcome in alone.outcomes if outcome.error), None)
            if wrong is not None:
                bad[row] = wrong
                if not all_errors:
                    return [bad.get(i, Outcome()) for i in range(len(columns))]
        if not bad:
            raise self.whole_error(answer.whole, len(columns))
        good = [row for row in range(len(columns)) if row not in bad]
        again = self.ask(columns.select(good)) if good else Answer()
        if again.whole is not None:
            raise self.whole_error(again.whole, len(good))
        return _placed(len(columns), bad, good, again.outcomes)

    def ask(self, columns: Columns) -> Answer:
        """One call on these responses together."""
        process = self.take()
        limit = self.seconds * len(columns)
        try:
            process.send(self.job(columns, limit))
            answer: Answer = process.receive(time.monotonic() + limit)
        except LateError:
            process.close()
            return Answer(whole=late(limit))
        except DeadError as error:
            process.close()
            return Answer(whole=dead(error))
        self.idle.append(process)
        return answer

    def whole_error(self, outcome: Outcome, count: int) -> RewardError:
        spec, what = self.order.spec, self.order.what
        if outcome.error.startswith("returned"):
            fix = f"make {spec} return a list with one float per response, in their order"
            return RewardError(f"{what} {spec} {outcome.error}", fix=fix)
        detail = f": {outcome.detail}" if outcome.detail else ""
        fix = outcome.fix or f"correct {spec}; it must accept every response, also an empty one"
        return RewardError(f"{what} {spec} {outcome.error} a batch of {count} responses{detail}", fix=fix)


def dead(error: DeadError) -> Outcome:
    return Outcome(error="failed on", detail=str(error), fix="look at what it printed last")


def _placed(count: int, bad: dict[int, Outcome], good: Sequence[int], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes of all rows, from those of the bad ones and of the good ones."""
    placed = {**bad, **dict(zip(good, outcomes, strict=True))}
    return [placed[row] for row in range(count)]
