"""The half of a step that every schedule shares: score, update, publish; and what it says about stale rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tutelage.errors import ConfigError
from tutelage.protocols import Algorithm, Pending, Transport
from tutelage.types import Stat, Stats, merge_stats

Draw = Callable[[], Any | None]
"""The next batch of the data, numbered by its place in it; None when every step of the run has one, or, where steps may
draw several, at the end of the data."""


@dataclass(frozen=True)
class StepResult:
    """batch: the scored batch that was learned from; state: the algorithm's next one; stats: named sums and weights;
    notes: what the run should say about the step.
    """

    batch: Any
    state: Any
    stats: Stats
    notes: tuple[str, ...] = ()


class Schedule(Protocol):
    """Decides when to generate, learn and publish.

    LOOKS_AHEAD  whether rollouts are begun before their step; a checkpoint then holds them (`state`).
    refills      batches that a step may draw beyond its own; 0: one batch for each step.
    advance      one training step; it draws the batches it needs.  None: there is nothing left to learn from.
    state        what was begun ahead, gathered: a dict that `engines.state.flatten` takes apart.
    """

    LOOKS_AHEAD: bool

    @property
    def refills(self) -> int: ...
    @property
    def algorithm(self) -> Algorithm: ...
    def advance(self, draw: Draw, state: Any) -> StepResult | None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, saved: dict[str, Any]) -> None: ...


class GeneratingAlgorithm(Algorithm, Protocol):
    """An algorithm whose `collect` is `infer(generate(prompts))`, so that a schedule may do them apart.

    generate  the rollouts; they may be begun before the weights of their step exist.
    infer     every inference pass on them (logprobs, values, scores), under the trainer's weights of the moment: the
              old logprobs of stale rollouts are those of the proximal policy (decoupled PPO, Hilton et al. 2022).
    """

    def generate(self, prompts: Any, roles: Any, cfg: Any, /) -> Any: ...
    def infer(self, rollout: Any, roles: Any, cfg: Any, /) -> Any: ...


def generating(algorithm: Any, kind: str) -> GeneratingAlgorithm:
    """The algorithm itself.  Raises ConfigError where it generates nothing that a schedule could begin ahead."""
    if algorithm.PUBLISHED and hasattr(algorithm, "generate") and hasattr(algorithm, "infer"):
        return algorithm
    name = getattr(algorithm, "__name__", type(algorithm).__name__).rpartition(".")[2]
    raise ConfigError(
        f"schedule.kind is {kind}, but {name} generates nothing that could be begun ahead",
        fix="use schedule.kind=synchronous",
    )


@dataclass(frozen=True)
class Training:
    """Advantages, updates and publication of one collected batch."""

    algorithm: Algorithm
    transport: Transport
    roles: Any
    cfg: Any

    def update(self, collected: Pending, state: Any) -> tuple[StepResult, list[Pending]]:
        """The result of the step, and its publications, which nobody has waited for yet."""
        algorithm, roles, cfg = self.algorithm, self.roles, self.cfg
        scored, after, stats = self.transport.call(algorithm.advantages, collected, state, cfg, outputs=3)
        updates = algorithm.learn(scored.gather(), roles, cfg, state)
        published = [getattr(roles, name).publish(state.step + 1) for name in algorithm.PUBLISHED]
        (learned,) = self.transport.call(merged_by_role, gathered(updates), algorithm.PREFIXES, stats)
        return StepResult(scored.gather(), after.gather(), learned.gather()), published

    def with_staleness(self, result: StepResult, state: Any, counts: dict[str, int]) -> StepResult:
        """The result with `schedule/...` statistics."""
        (stats,) = self.transport.call(staleness_stats, result.batch, state.step, counts, result.stats)
        return StepResult(result.batch, result.state, stats.gather())


class Publications:
    """Publications on their way.  One is waited for when the next is sent off, so that neither side stands still."""

    def __init__(self) -> None:
        self.sent: list[Pending] = []

    def follow(self, published: list[Pending]) -> None:
        """These are the newest; an error of the ones before arrives here."""
        self.settle()
        self.sent = published

    def settle(self) -> None:
        """Wait for all of them."""
        waiting, self.sent = self.sent, []
        for publication in waiting:
            publication.gather()


def gathered(updates: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(role, statistics) of every update of a step, in order."""
    return [(role, pending.gather()) for update in updates for role, pending in update.items()]


def merged_by_role(updates: list[tuple[str, Stats]], prefixes: dict[str, str], collected: Stats) -> Stats:
    """Statistics of the collection and of all updates, summed exactly, the latter named by role.

    In an update of one role by the losses of several (`algorithms.summed`), ROLE/NAME is a statistic of ROLE's loss.
    """

    def named_by(role: str, name: str) -> str:
        part, slash, rest = name.partition("/")
        return f"{prefixes[part]}/{rest}" if slash and part in prefixes else f"{prefixes[role]}/{name}"

    named = [{named_by(role, name): stat for name, stat in stats.items()} for role, stats in updates]
    return {**collected, **merge_stats(named)}


def staleness_stats(batch: Any, version: int, counts: dict[str, int], stats: Stats) -> Stats:
    """`stats` and: staleness = trainer's version before the updates - version of the weights that sampled.

    The mean is over response tokens, the maximum over responses; `counts` are the schedule's own, in prompts.
    """
    age_B = version - batch.weights_version.double()
    lens_B = batch.sequences.response_lens.double()
    return {
        **stats,
        "schedule/staleness_mean": Stat(float((age_B * lens_B).sum()), float(lens_B.sum())),
        "schedule/staleness_max": Stat(float(age_B.max()), 1),
        **{f"schedule/{name}": Stat(float(count), 1) for name, count in counts.items()},
    }
