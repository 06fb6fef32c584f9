"""Responses that wait for pages, and the rule by which they begin.

Shapes: V vocabulary.

A request is one response.  Requests with the same tokens, whatever their prompt is called, are one group: it is
prefilled once, and its rows share the prompt's pages.

Order   by priority, then the longest prompt first, then the order of the requests: what needs most room starts early,
        and the pages of an ended row are enough for the next one.  Nothing overtakes what is before it.
When    rows begin as soon as they fit, if that needs no prefill, or nothing else runs, or the prompts that fit have at
        least `WORTH_TOKENS` tokens, with which a packed prefill runs at the rate of larger ones, or they fill a
        pass, or nothing else waits, or fewer than three quarters of the most rows so far are running.  Else they wait
        for company: an empty place costs no computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tutelage.rollout.inprocess.pages import PageTable, Prefix, pages_for

WORTH_TOKENS = 64
"""Prompt tokens that are worth a prefill pass of their own beside running rows."""

_FEW_ROWS = 0.75
"""Rows begin whatever their number when fewer than this share of the most rows so far is running."""


@dataclass(frozen=True)
class Request:
    """One response to generate.

    tokens    prompt and response so far;  done  tokens of that response.
    key       of its randomness;  name  of its prompt, for errors.
    priority  lower ones begin first.
    """

    tokens: tuple[int, ...]
    key: int
    name: str
    done: int = 0
    priority: int = 0


@dataclass(eq=False)
class Group:
    """Requests (by number) with the same tokens that have not begun.

    prefix, logits: its pages and the logits (V,) after its last token, where its prompt is prefilled already.
    """

    tokens: tuple[int, ...]
    priority: int
    rows: deque[int] = field(default_factory=deque)
    prefix: Prefix | None = None
    logits: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Admission:
    """The next `count` rows of a group begin."""

    group: Group
    count: int


class Queue:
    """The groups that wait, and what fits of them.

    most  response tokens at most;  slots  rows at once;  prefill_tokens  prompt tokens of one packed pass.
    """

    def __init__(self, requests: Sequence[Request], most: int, slots: int, prefill_tokens: int) -> None:
        self.requests = requests
        self.most = most
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self._peak = 0
        found: dict[tuple[int, ...], Group] = {}
        for number, request in enumerate(requests):
            group = found.setdefault(request.tokens, Group(request.tokens, request.priority))
            group.rows.append(number)
            group.priority = min(group.priority, request.priority)
        # Equal keys keep the order of their first requests.
        self._groups = deque(sorted(found.values(), key=lambda g: (g.priority, -len(g.tokens))))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def own_positions(self, number: int) -> int:
        """Positions that a row writes at most: its last token is never written."""
        return self.most - self.requests[number].done - 1

    def largest(self, page: int) -> int:
        """Pages of the row that needs most, alone."""
        return max(
            (
                pages_for(len(request.tokens), page) + pages_for(self.own_positions(number), page)
                for number, request in enumerate(self.requests)
            ),
            default=0,
        )

    def pages_needed(self, page: int) -> int:
        """Pages with which no row would have to wait for another, `slots` aside."""
        prompts = sorted((pages_for(len(g.tokens), page) for g in self._groups), reverse=True)
        own = sorted((pages_for(self.own_positions(n), page) for n in range(len(self.requests))), reverse=True)
        return sum(prompts[: self.slots]) + sum(own[: self.slots])

    def due(self, table: PageTable) -> list[Admission]:
        """What begins now, in one prefill pass at most; nothing where nothing fits or it is not worth a pass yet."""
        if not self._groups:
            return []
        running = len(table)
        self._peak = max(self._peak, running)
        fitting, fresh, full = self._fitting(table.room, self.slots - running, table.page)
        if fitting and (
            running == 0 or fresh == 0 or fresh >= WORTH_TOKENS or full or running < _FEW_ROWS * self._peak
        ):
            return fitting
        return [admission for admission in fitting if admission.group.prefix is not None]

    def _fitting(self, room: int, free: int, page: int) -> tuple[list[Admission], int, bool]:
        """(admissions, prompt tokens to be prefilled for them, whether the pass is full or nothing else waits)."""
        fitting: list[Admission] = []
        fresh = 0
        for group in self._groups:
            size = len(group.tokens) if group.prefix is None else 0
            if fresh and fresh + size > self.prefill_tokens:
                return fitting, fresh, True
            room -= pages_for(size, page)
            count = 0
            for number in group.rows:
                room -= pages_for(self.own_positions(number), page)
                if room < 0 or count == free:
                    break
                count += 1
            if count:
                fitting.append(Admission(group, count))
                fresh, free = fresh + size, free - count
            if count < len(group.rows):
                return fitting, fresh, False
        return fitting, fresh, True

    def begin(self, admissions: Sequence[Admission]) -> list[list[int]]:
        """The requests that begin, group by group; groups of which nothing is left leave the queue."""
        begun = [[a.group.rows.popleft() for _ in range(a.count)] for a in admissions]
        while self._groups and not self._groups[0].rows:
            self._groups.popleft()
        return begun
