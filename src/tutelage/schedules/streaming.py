"""Scores begin while other responses still decode, and a generation ends when a step has what it needs.

`Streamed` stands in for the roles of an algorithm.  Its actor asks the rollout engine for one group after the other, as
they end, and hands each to the reward in a thread beside it.  The responses come back in the order of their prompts,
with their scores, which its reward then only reads.  So an algorithm that scores what it generates, as it is, works
with it unchanged.  What overlaps is what waits: rules in processes of their own, judges on a network, a reward model on
another device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tutelage.protocols import Transport
from tutelage.transport.pending import Unreadable
from tutelage.types import Rollout

READ = ("sequences", "texts", "messages", "truths", "score")


@dataclass
class Enough:
    """When the groups from the first prompt on, without a gap, hold `missing` that say something.

    says   whether a scored group does.
    whole  groups without a gap, up to the one that was enough;  informative  how many of them say something.

    A group that still decodes stands behind those, so it can change nothing.  Groups behind them are dropped even where
    they had ended: the result depends on the responses, not on which of them was quicker.
    """

    missing: int
    says: Callable[[Rollout], bool]
    whole: int = 0
    informative: int = 0
    _told: dict[int, bool] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        return self.informative >= self.missing

    def tell(self, part: Rollout) -> None:
        """All responses of one group, with their scores."""
        self._told[_place(part)] = self.says(part)
        while self.whole in self._told and not self.reached:
            self.informative += self._told[self.whole]
            self.whole += 1


class Streamed:
    """Roles whose `actor.generate` streams and scores.  enough: when to give the rest up; None: never."""

    def __init__(self, roles: Any, transport: Transport, enough: Enough | None = None) -> None:
        self._roles = roles
        streamed: list[Rollout] = []
        self.actor = _StreamedActor(roles, transport, enough, streamed)
        self.reward = _KnownScores(roles.reward, transport, streamed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._roles, name)

    def __contains__(self, name: str) -> bool:
        return name in self._roles


class _KnownScores:
    """The reward, which is not asked again for what it has scored.  streamed: those responses."""

    def __init__(self, reward: Any, transport: Transport, streamed: list[Rollout]) -> None:
        self._reward = reward
        self._transport = transport
        self._streamed = streamed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reward, name)

    def score(self, rollout: Any) -> Any:
        known = rollout.gather()
        if isinstance(known, Unreadable) or not any(_same(known, one) for one in self._streamed):
            return self._reward.score(rollout)
        return self._transport.put(known.score)


def _same(one: Rollout, other: Rollout) -> bool:
    """Whether a reward would read the same of both: the very columns, whatever else was added."""
    return all(getattr(one, name) is getattr(other, name) for name in READ)


class _StreamedActor:
    def __init__(self, roles: Any, transport: Transport, enough: Enough | None, streamed: list[Rollout]) -> None:
        self._streamed = streamed
        self._actor = roles.actor
        self._reward = roles.reward
        self._transport = transport
        self._enough = enough

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def generate(self, prompts: Any) -> Any:
        """Pending: the scored responses, in the order of their prompts; those of the first `Enough.whole` groups."""
        if isinstance(prompts.gather(), Unreadable):  # nothing runs on this transport
            return self._actor.generate(prompts)
        scoring = _Scoring(self._score, self._enough)
        self._actor.begin_parts(prompts).gather()
        try:
            while not scoring.over(wait=False):
                part = self._actor.next_part().gather()
                if part is None:
                    break
                scoring.begin(part)
            scoring.over(wait=True)
            kept, dropped = scoring.sorted_out()
        finally:
            scoring.close()
            self._actor.close_parts().gather()
        if dropped:
            self._reward.forget_errors(dropped).gather()
        self._streamed.append(kept)
        return self._transport.put(kept)

    def _score(self, part: Rollout) -> Rollout:
        pending = self._transport.put(part)
        scored: Rollout = part.adding(score=self._reward.score(pending).gather())
        return scored


class _Scoring:
    """Groups on their way through one thread, in the order in which they ended."""

    def __init__(self, score: Callable[[Rollout], Rollout], enough: Enough | None) -> None:
        self._score = score
        self._enough = enough
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scores")
        self._waiting: deque[Future[Rollout]] = deque()
        self._scored: list[Rollout] = []
        self._begun: list[Rollout] = []

    def begin(self, part: Rollout) -> None:
        self._begun.append(part)
        self._waiting.append(self._thread.submit(self._score, part))

    def over(self, wait: bool) -> bool:
        """Whether what is not here can be given up, by the scores that are known; wait: for all that are needed.

        Raises what the reward raised.
        """
        enough = self._enough
        while self._waiting and (wait or self._waiting[0].done()):
            if enough is not None and enough.reached:
                return True
            self._scored.append(self._waiting.popleft().result())
            if enough is not None:
                enough.tell(self._scored[-1])
        return enough is not None and enough.reached

    def sorted_out(self) -> tuple[Rollout, list[tuple[str, int]]]:
        """What is kept, in the order of the prompts; prompt id and sample of what else was to be scored."""
        last = None if self._enough is None else self._enough.whole
        kept = {_place(part): part for part in self._scored if last is None or _place(part) < last}
        others = [part for part in self._begun if _place(part) not in kept]
        names = [(name, int(k)) for part in others for name, k in zip(part.prompt_ids, part.samples, strict=True)]
        return Rollout.concat([kept[place] for place in sorted(kept)]), names

    def close(self) -> None:
        """A score that is being computed is waited for; those behind it are not begun."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _place(part: Rollout) -> int:
    """Of its prompt in the batch."""
    return int(part.group[0])
