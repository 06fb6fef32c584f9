"""Which prompt and which row holds which page: bookkeeping on the host, no tensor of the model.

Shapes: b rows still decoding, P prompts they belong to, M lanes (the most rows of one prompt), J pages of the longest
prompt, I pages of the longest own part.

Prompts take the lowest free pages, rows the highest, so that both sides stay dense and reach far into the pool only
when much of it is in use.  Room for all pages that a row may ever need is promised when it begins, so that no row has
to wait in the middle.  A promise takes no page: a page is taken when it is first written.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutelage.models.decoding import PagedStep


def pages_for(positions: int, page: int) -> int:
    return -(-positions // page)


@dataclass(eq=False)
class Prefix:
    """The pages of one prompt; length in tokens.

    rows  rows that read them.  held: whether rows that have not begun will read them too.
    """

    pages: tuple[int, ...]
    length: int
    rows: int = 0
    held: bool = True


@dataclass(eq=False)
class PageTable:
    """Owners of `pages` pages of `page` positions each.  Rows keep the order in which they were added.

    peak  the most pages that were in use at once.
    """

    pages: int
    page: int
    peak: int = 0
    _free: list[int] = field(default_factory=list)
    _prefixes: list[Prefix] = field(default_factory=list)
    _own: list[list[int]] = field(default_factory=list)
    _promised: list[int] = field(default_factory=list)
    _lens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    _prompt_lens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    _layout: PagedStep | None = None

    def __post_init__(self) -> None:
        self._free = list(range(self.pages))

    def __len__(self) -> int:
        return len(self._own)

    @property
    def free(self) -> tuple[int, ...]:
        """Pages that nobody holds, ascending."""
        return tuple(self._free)

    @property
    def room(self) -> int:
        """Pages that are free and promised to nobody."""
        return len(self._free) - sum(self._promised)

    @property
    def longest(self) -> int:
        """Positions of the longest row, the token it is about to write included."""
        return int((self._prompt_lens + self._lens).max()) + 1

    def prefix(self, length: int) -> Prefix:
        """Pages for a prompt of `length` tokens; the caller has looked at `room`."""
        count = pages_for(length, self.page)
        taken, self._free = self._free[:count], self._free[count:]
        self._note()
        return Prefix(tuple(taken), length)

    def add(self, prefixes: Sequence[Prefix], positions: Sequence[int]) -> None:
        """Rows, each behind a prompt, that will write at most `positions` positions of their own."""
        for prefix, most in zip(prefixes, positions, strict=True):
            prefix.rows += 1
            self._prefixes.append(prefix)
            self._own.append([])
            self._promised.append(pages_for(most, self.page))
        self._lens = torch.cat([self._lens, torch.zeros(len(prefixes), dtype=torch.int64)])
        self._prompt_lens = torch.tensor([p.length for p in self._prefixes], dtype=torch.int64)
        self._layout = None

    def release(self, prefix: Prefix) -> None:
        """Free the pages of a prompt that nobody reads and nobody will."""
        if prefix.rows == 0 and not prefix.held:
            self._give_back(prefix.pages)

    def keep(self, rows: Sequence[int]) -> None:
        """These rows go on, in this order; the pages of all others are free."""
        kept = set(rows)
        for row in range(len(self)):
            if row not in kept:
                self._give_back(self._own[row])
                self._prefixes[row].rows -= 1
                self.release(self._prefixes[row])
        self._prefixes = [self._prefixes[row] for row in rows]
        self._own = [self._own[row] for row in rows]
        self._promised = [self._promised[row] for row in rows]
        index = torch.tensor(rows, dtype=torch.int64)
        self._lens, self._prompt_lens = self._lens[index], self._prompt_lens[index]
        self._layout = None

    def extend(self) -> list[int]:
        """Every row is about to write one position: the pages that rows begin with it."""
        fresh = []
        for row in (self._lens % self.page == 0).nonzero().squeeze(1).tolist():
            fresh.append(self._free.pop())
            self._own[row].append(fresh[-1])
            self._promised[row] -= 1
        if fresh:
            self._note()
            self._layout = None
        return fresh

    def advance(self) -> None:
        """Every row has written its position."""
        self._lens = self._lens + 1

    def layout(self, device: torch.device) -> PagedStep:
        """What the attention reads, without what changes from step to step (`PagedStep.at`); made anew only when pages
        have changed hands."""
        if self._layout is None:
            self._layout = self._build().to(device)
        return self._layout

    def _build(self) -> PagedStep:
        numbers: dict[int, int] = {}
        prompt_b = torch.tensor([numbers.setdefault(id(p), len(numbers)) for p in self._prefixes])
        prefixes = list({id(p): p for p in self._prefixes}.values())
        lane_b, rows_PM = _lanes(prompt_b, len(prefixes))
        shared = _Ragged.of([p.pages for p in prefixes])
        own = _Ragged.of(self._own)
        first, end = int(own.flat.min()), int(shared.flat.max()) + 1
        return PagedStep(
            shared=end,
            own=first,
            longest=0,
            dense=torch.equal(rows_PM.view(-1), torch.arange(len(self))),
            rows=rows_PM,
            lane_of_row=prompt_b * rows_PM.shape[1] + lane_b,
            prompt_of_page=shared.owners(0, end),
            place_of_page=shared.places(0, end),
            pages_of_prompt=shared.padded(0),
            shared_bag=shared.flat,
            shared_starts=shared.starts,
            row_of_own=own.owners(first, self.pages),
            place_of_own=own.places(first, self.pages),
            own_of_row=own.padded(first),
            own_bag=own.flat - first,
            own_starts=own.starts,
            hidden=torch.empty(0),
            write_page=torch.tensor([pages[-1] for pages in self._own]),
            write_at=torch.empty(0, dtype=torch.int64),
            prompt_lens=torch.empty(0, dtype=torch.int64),
            own_lens=torch.empty(0, dtype=torch.int64),
        )

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            insort(self._free, page)

    def _note(self) -> None:
        self.peak = max(self.peak, self.pages - len(self._free))


def _lanes(prompt_b: Tensor, prompts: int) -> tuple[Tensor, Tensor]:
    """(b,) number of a row among the rows of its prompt, and (P, M) the rows of each prompt, 0 in empty lanes."""
    counts = torch.bincount(prompt_b, minlength=prompts)
    order = torch.argsort(prompt_b, stable=True)
    starts = counts.cumsum(0) - counts
    lane_b = torch.empty_like(prompt_b)
    lane_b[order] = torch.arange(prompt_b.shape[0]) - starts[prompt_b[order]]
    rows_PM = torch.zeros((prompts, int(counts.max())), dtype=torch.int64)
    rows_PM[prompt_b, lane_b] = torch.arange(prompt_b.shape[0])
    return lane_b, rows_PM


@dataclass(frozen=True, eq=False)
class _Ragged:
    """Lists of pages, flat: whose each is, and its number in its list."""

    flat: Tensor
    owner: Tensor
    number: Tensor
    starts: Tensor
    count: int
    width: int

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> _Ragged:
        lens = torch.tensor([len(pages) for pages in lists])
        starts = lens.cumsum(0) - lens
        flat = torch.tensor(list(itertools.chain.from_iterable(lists)))
        owner = torch.repeat_interleave(torch.arange(len(lists)), lens)
        number = torch.arange(flat.shape[0]) - starts[owner]
        return cls(flat, owner, number, starts, len(lists), int(lens.max()))

    def padded(self, first: int) -> Tensor:
        """(lists, width): pages counted from `first`, those of a list before its blanks, which name its first page."""
        out = (self.flat[self.starts] - first)[:, None].expand(-1, self.width).contiguous()
        out[self.owner, self.number] = self.flat - first
        return out

    def owners(self, first: int, last: int) -> Tensor:
        return self._by_page(self.owner, first, last)

    def places(self, first: int, last: int) -> Tensor:
        return self._by_page(self.owner * self.width + self.number, first, last)

    def _by_page(self, what: Tensor, first: int, last: int) -> Tensor:
        out = torch.zeros(last - first, dtype=torch.int64)
        out[self.flat - first] = what
        return out
