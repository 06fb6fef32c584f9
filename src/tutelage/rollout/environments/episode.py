"""One episode: its tokens as they were sampled, what the environment said, and where each reward belongs.

Shapes: B episodes, R flat response tokens.

A response is  turn 1, observation 1, turn 2, ..., last turn.  Tokens of turns are the policy's own and trained;
observations are holes.  A response always ends with a token of the policy: what it would never read is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tutelage.protocols import Turn
from tutelage.types import Prompts, Ragged, Rollout, Sequences


@dataclass
class Episode:
    """place: of the prompt in its batch.  environment: None where there is none that could be begun.

    tokens, logps, trained  of the response so far, one entry a token; a hole has logp 0.
    rewards  (place of the turn's last token, reward) of every turn.    turn_start: where the last turn begins.
    messages the whole chat, the prompt's first.
    live     goes on.  finished: the last turn ended by itself and the environment said that the episode is done.
    """

    name: str
    place: int
    sample: int
    prompt_id: str
    prompt: tuple[int, ...]
    messages: list[dict[str, str]]
    truth: Any
    environment: Any = None
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    turn_start: int = 0
    live: bool = True
    finished: bool = False
    error: str = ""
    version: int | None = None
    opening: int = 0

    def __post_init__(self) -> None:
        self.opening = len(self.messages)

    @property
    def label(self) -> str:
        return f"environment {self.name!r}, prompt {self.prompt_id!r}, sample {self.sample}"

    def said(self, tokens: Sequence[int], logps: Sequence[float], text: str, version: int) -> None:
        """A turn of the policy."""
        self.turn_start = len(self.tokens)
        self.tokens += tokens
        self.logps += logps
        self.trained += [True] * len(tokens)
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1
        self.version = version if self.version is None else min(self.version, version)

    def told(self, turn: Turn) -> None:
        """Reward and numbers of what the environment said to the last turn; the observation is added by `heard`."""
        self.rewards.append((len(self.tokens) - 1, float(turn.reward)))
        for key, value in turn.info.items():
            self.info[key] = self.info.get(key, 0.0) + float(value)

    def heard(self, message: Mapping[str, str], tokens: Sequence[int]) -> None:
        """An observation, as the policy will read it."""
        self.messages.append(dict(message))
        self.tokens += tokens
        self.logps += [0.0] * len(tokens)
        self.trained += [False] * len(tokens)

    def end(self, *, finished: bool) -> None:
        self.live, self.finished = False, finished

    def fail(self, error: str) -> None:
        """Nothing of it is trained or rewarded: what the environment would have paid is not known."""
        self.end(finished=False)
        self.error = error
        self.rewards.clear()
        self.trained = [False] * len(self.trained)

    def count(self, name: str, amount: float) -> None:
        if amount:
            self.info[name] = self.info.get(name, 0.0) + amount


def problem_of(turn: Any) -> str:
    """What is wrong with what an environment's `step` returned; nothing: ""."""
    if not isinstance(turn, Turn):
        return f"step returned a {type(turn).__name__}, not a tutelage.protocols.Turn"
    if not isinstance(turn.observation, str) or not isinstance(turn.role, str):
        return f"observation and role are {turn.observation!r:.60} and {turn.role!r:.20}, not text"
    values = {"reward": turn.reward, **turn.info}
    for name, value in values.items():
        try:
            finite = math.isfinite(float(value))
        except (TypeError, ValueError):
            finite = False
        if not finite:
            return f"{name} is {value!r:.60}, not a finite number"
    return ""


def assembled(episodes: Sequence[Episode], prompts: Prompts, texts: Sequence[str]) -> Rollout:
    """One batch, a row an episode in the order given; see `Rollout` for the columns."""
    lens = torch.tensor([len(e.tokens) for e in episodes], dtype=torch.int64)
    paid = torch.zeros(int(lens.sum()))
    start = 0
    for e in episodes:
        for place, reward in e.rewards:
            paid[start + place] += reward
        start += len(e.tokens)
    return Rollout(
        sequences=Sequences.build(
            [e.prompt for e in episodes], [e.tokens for e in episodes], [e.trained for e in episodes]
        ),
        rollout_logp=Ragged(torch.tensor([x for e in episodes for x in e.logps], dtype=torch.float32), lens),
        finished=torch.tensor([e.finished for e in episodes], dtype=torch.bool),
        prompt_ids=tuple(e.prompt_id for e in episodes),
        samples=torch.tensor([e.sample for e in episodes], dtype=torch.int64),
        group=torch.tensor([e.place for e in episodes], dtype=torch.int64),
        truths=tuple(e.truth for e in episodes),
        messages=tuple(prompts.messages[e.place] for e in episodes),
        texts=tuple(texts),
        weights_version=torch.tensor([e.version or 0 for e in episodes], dtype=torch.int64),
        token_reward=Ragged(paid, lens),
        environments=tuple(e.name for e in episodes),
        turns=torch.tensor([e.turns for e in episodes], dtype=torch.int64),
        transcripts=tuple(tuple(e.messages[e.opening :]) for e in episodes),
        episode_info=tuple(dict(e.info) for e in episodes),
        episode_errors=tuple(e.error for e in episodes),
    )
