"""Dynamic sampling: further prompts are answered until a step has the groups that it can learn from (DAPO, eq. 11).

Which groups say something is the algorithm's predicate (`Refilling`); when to generate again is decided here.
Shapes: B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tutelage.protocols import Pending, Transport
from tutelage.schedules.streaming import Enough, Streamed
from tutelage.schedules.training import Draw
from tutelage.transport.pending import Unreadable
from tutelage.types import Rollout, Stat, Stats, merge_stats


class Refilling(Protocol):
    """What an algorithm with dynamic sampling has besides `Algorithm`; all pure.

    refills          further generations that a step may use; 0: it takes groups as they come.
    informative      (B,) bool: rows of groups that say something.
    generated_stats  statistics of everything that was generated.
    fewest_rows      responses that a step needs at least.
    """

    def refills(self, cfg: Any, /) -> int: ...
    def informative(self, batch: Rollout, cfg: Any, /) -> Tensor: ...
    def generated_stats(self, batch: Rollout, cfg: Any, /) -> Stats: ...
    def fewest_rows(self, cfg: Any, /) -> int: ...
    def collect(self, batch: Any, roles: Any, cfg: Any, /) -> Any: ...


def refills_of(algorithm: Any, cfg: Any) -> int:
    """Further generations that a step may use; 0 for an algorithm that drops no group."""
    asked = getattr(algorithm, "refills", None)
    return 0 if asked is None else int(asked(cfg))


@dataclass(frozen=True)
class Filled:
    """collected: the pending batch of a step.  notes: what the run should say about it."""

    collected: Pending
    stats: Stats = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def filled(
    draw: Draw, transport: Transport, algorithm: Refilling, roles: Any, cfg: Any, limit: int, *, stream: bool = False
) -> Filled | None:
    """Collect batches of prompts until there are as many informative groups as the first one has prompts.

    The first groups in the order in which their prompts were drawn are kept; those beyond are dropped: another step's
    weights would make them stale.  After `limit` further generations, or at the end of the data, the step goes on with
    the informative groups it has, and a note says so; where they have fewer responses than the algorithm
    can do with (`fewest_rows`), groups that say nothing fill them up.  None: the data has no batch left.

    stream  responses are scored while others decode, and a generation ends when the step has its groups.

    On a transport where nothing runs, one generation is what a step is expected to take.
    """
    first = draw()
    if first is None:
        return None
    wanted, batch = len(first), first
    parts: list[Sifted] = []
    given_up = 0
    while True:
        if stream:
            missing = wanted - sum(part.informative for part in parts)
            enough = Enough(missing, lambda part: bool(algorithm.informative(part, cfg).any()))
            pending = algorithm.collect(transport.put(batch), Streamed(roles, transport, enough), cfg)
            given_up += len(batch) - enough.whole
        else:
            pending = algorithm.collect(transport.put(batch), roles, cfg)
        (sifted,) = transport.call(sift, pending, algorithm, cfg)
        found = sifted.gather()
        if isinstance(found, Unreadable):
            return Filled(pending)
        parts.append(found)
        complete = sum(part.informative for part in parts) >= wanted
        batch = None if complete or len(parts) > limit else draw()
        if batch is None:
            break
    kept = chosen(parts, wanted, algorithm.fewest_rows(cfg))
    informative, generated = sum(part.informative for part in parts), sum(part.groups for part in parts)
    counts = {
        "schedule/refills": Stat(float(len(parts) - 1), 1),
        "schedule/groups_generated": Stat(float(generated), 1),
        "schedule/groups_informative_fraction": Stat(float(informative), float(generated)),
        "schedule/groups_surplus": Stat(float(max(informative - wanted, 0)), 1),
    }
    if stream:
        counts["schedule/groups_given_up"] = Stat(float(given_up), 1)
    notes: tuple[str, ...] = ()
    if informative < wanted:
        why = f"{limit} refills were used" if len(parts) > limit else "the data has no prompts left"
        failed = merge_stats([part.stats for part in parts]).get("reward/errors")
        told = f"; {failed.total:g} responses have no score" if failed is not None else ""
        notes = (f"{informative} of {wanted} groups of this step have scores that differ: {why}{told}",)
    return Filled(transport.put(kept), {**merge_stats([part.stats for part in parts]), **counts}, notes)


@dataclass(frozen=True)
class Sifted:
    """One generation.  rows: its responses.  says: (B,) bool, rows of groups that say something."""

    rows: Rollout
    says: Tensor
    stats: Stats

    @property
    def groups(self) -> int:
        return len(self.rows.group.unique())

    @property
    def informative(self) -> int:
        return len(self.rows.group[self.says].unique())


def sift(batch: Rollout, algorithm: Refilling, cfg: Any) -> Sifted:
    """What the algorithm says about the groups of a collected batch."""
    return Sifted(batch, algorithm.informative(batch, cfg), algorithm.generated_stats(batch, cfg))


def chosen(parts: list[Sifted], wanted: int, rows: int) -> Rollout:
    """The first `wanted` informative groups; and others, in the order they were drawn, while there are fewer than
    `rows` responses.  Groups are numbered anew.
    """
    order = [(place, int(group)) for place, part in enumerate(parts) for group in _groups(part.rows.group)]
    told = [(place, int(g)) for place, part in enumerate(parts) for g in _groups(part.rows.group[part.says])]
    picked = told[:wanted]
    size = sum(_count(parts[place], group) for place, group in picked)
    for name in order:
        if size >= rows:
            break
        if name not in picked:
            picked.append(name)
            size += _count(parts[name[0]], name[1])
    cut = [parts[place].rows.select(_rows(parts[place], group)) for place, group in picked]
    lens = torch.tensor([len(rows) for rows in cut])
    return Rollout.concat(cut).adding(group=torch.repeat_interleave(torch.arange(len(cut)), lens))


def _groups(group_B: Tensor) -> list[int]:
    """Each group once, as they come."""
    return list(dict.fromkeys(group_B.tolist()))


def _rows(part: Sifted, group: int) -> Tensor:
    return torch.nonzero(part.rows.group == group).squeeze(1)


def _count(part: Sifted, group: int) -> int:
    return len(_rows(part, group))
