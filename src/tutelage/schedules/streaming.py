"""Scores begin while other responses still decode, and a generation ends when a step has what it needs.

`Streamed` stands in for the roles of an algorithm.  Its actor asks the rollout engine for one group after the other, as
they end, and hands each to the reward in a thread beside it.  The responses come back in the order of their prompts,
with their scores, which its reward then only reads.  So every algorithm that generates and scores works with it
unchanged.  What overlaps is what waits: rules in processes of their own, judges on a network, a reward model on another
device.
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
        self._told[int(part.group[0])] = self.says(part)
        while self.whole in self._told and not self.reached:
            self.informative += self._told[self.whole]
            self.whole += 1


class Streamed:
    """Roles whose `actor.generate` streams and scores.  enough: when to give the rest up; None: never."""

    def __init__(self, roles: Any, transport: Transport, enough: Enough | None = None) -> None:
        self._roles = roles
        self.actor = _StreamedActor(roles, transport, enough)
        self.reward = _KnownScores(roles.reward, transport)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._roles, name)

    def __contains__(self, name: str) -> bool:
        return name in self._roles


class _KnownScores:
    """The reward, which is not asked again for what it has scored."""

    def __init__(self, reward: Any, transport: Transport) -> None:
        self._reward = reward
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reward, name)

    def score(self, rollout: Any) -> Any:
        known = rollout.gather()
        if isinstance(known, Unreadable) or known.score is None:
            return self._reward.score(rollout)
        return self._transport.put(known.score)


class _StreamedActor:
    def __init__(self, roles: Any, transport: Transport, enough: Enough | None) -> None:
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
            return self._transport.put(scoring.kept())
        finally:
            scoring.close()
            self._actor.close_parts().gather()

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

    def begin(self, part: Rollout) -> None:
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

    def kept(self) -> Rollout:
        enough = self._enough
        places = {int(part.group[0]): part for part in self._scored}
        return Rollout.concat([places[place] for place in sorted(places) if enough is None or place < enough.whole])

    def close(self) -> None:
        """A score that is being computed is waited for; those behind it are not begun."""
        self._thread.shutdown(wait=True, cancel_futures=True)
