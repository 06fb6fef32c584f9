"""When to generate, learn and publish.  A schedule knows no algorithm, an algorithm no schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tutelage.protocols import Algorithm, Transport
from tutelage.types import Stats, merge_stats


@dataclass(frozen=True)
class StepResult:
    """batch: the scored batch that was learned from; state: the algorithm's next one; stats: named sums and weights."""

    batch: Any
    state: Any
    stats: Stats


class Synchronous:
    """learn(advantages(collect(batch))), then publish; every rollout comes from the newest weights."""

    def __init__(self, algorithm: Algorithm, transport: Transport, roles: Any, cfg: Any) -> None:
        self.algorithm = algorithm
        self.transport = transport
        self.roles = roles
        self.cfg = cfg

    def step(self, batch: Any, state: Any) -> StepResult:
        algorithm, roles, cfg = self.algorithm, self.roles, self.cfg
        collected = algorithm.collect(self.transport.put(batch), roles, cfg)
        scored, after, stats = self.transport.call(algorithm.advantages, collected, state, cfg, outputs=3)
        updates = algorithm.learn(scored.gather(), roles, cfg, state)
        published = [getattr(roles, name).publish(state.step + 1) for name in algorithm.PUBLISHED]
        (learned,) = self.transport.call(merged_by_role, gathered(updates), algorithm.PREFIXES, stats)
        for publication in published:
            publication.gather()  # an error on the way to the rollout engine arrives here
        return StepResult(scored.gather(), after.gather(), learned.gather())


def gathered(updates: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(role, statistics) of every update of a step, in order."""
    return [(role, pending.gather()) for update in updates for role, pending in update.items()]


def merged_by_role(updates: list[tuple[str, Stats]], prefixes: dict[str, str], collected: Stats) -> Stats:
    """Statistics of the collection and of all updates, summed exactly, the latter named by role."""
    named = [{f"{prefixes[role]}/{name}": stat for name, stat in stats.items()} for role, stats in updates]
    return {**collected, **merge_stats(named)}
