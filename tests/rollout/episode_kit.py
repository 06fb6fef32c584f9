"""Hand-made environments, an engine that says what it is told, and episodes on the tiny chat models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tutelage.data.chat import ChatTemplate
from tutelage.protocols import Turn
from tutelage.rollout.environments.driver import EpisodeLimits, EpisodeRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Prompts, Ragged, Rollout, Sequences

END = 2


@dataclass
class Script:
    """An environment that answers turn k with the k-th of these; remembers what it was given."""

    turns: Sequence[Any]
    began: list[Any] = field(default_factory=list)
    seen: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def reset(self, messages: Sequence[Mapping[str, str]], truth: Any, seed: int) -> None:
        self.began.append((tuple(messages), truth, seed))

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        self.seen.append((tuple(tokens), text))
        found = self.turns[len(self.seen) - 1]
        if isinstance(found, Exception):
            raise found
        return found() if callable(found) else found


def more(observation: str, reward: float = 0.0, **rest: Any) -> Turn:
    return Turn(observation, reward, done=False, **rest)


def over(reward: float = 0.0, **rest: Any) -> Turn:
    return Turn("", reward, done=True, **rest)


class Speaker:
    """Answers every call with the next text, tokenised, `<|im_end|>` added unless the text ends with `|`.

    texts: by (sample, prompt id), one a turn.  Every token has logp -(its place + 1) / 8, which float32 holds exactly.
    """

    def __init__(self, template: ChatTemplate, texts: Mapping[tuple[int, str], Sequence[str]]) -> None:
        self.template = template
        self.texts = {key: list(value) for key, value in texts.items()}
        self.calls: list[tuple[Prompts, SamplingParams]] = []
        self.published = self.rested = 0

    def publish(self, version: int) -> None:
        self.published = version

    def rest(self) -> None:
        self.rested += 1

    def generate(self, prompts: Prompts) -> Rollout:
        raise AssertionError("episodes set their own limits")

    def complete(self, prompts: Prompts, params: SamplingParams) -> Rollout:
        self.calls.append((prompts, params))
        first = not any(":" in name for name in prompts.ids)
        keys = [
            (sample, name) if first else (int(name.partition(":")[0]), name.partition(":")[2])
            for name in prompts.ids
            for sample in range(params.n)
        ]
        rows, finished = [], []
        for key in keys:
            text = self.texts[key].pop(0)
            ids = [] if not text.rstrip("|") else self.template.tokenizer(text.rstrip("|"))["input_ids"]
            ids = [*ids, *([] if text.endswith("|") else [END])]
            finished.append(len(ids) <= params.max_new_tokens and not text.endswith("|"))
            rows.append(ids[: params.max_new_tokens])
        lens = torch.tensor([len(row) for row in rows])
        logp = [-(place + 1) / 8 for row in rows for place in range(len(row))]
        owner = torch.arange(len(prompts)).repeat_interleave(params.n)
        texts = self.template.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return Rollout(
            sequences=Sequences.build([prompts.tokens[p] for p in owner.tolist()], rows),
            rollout_logp=Ragged(torch.tensor(logp), lens),
            finished=torch.tensor(finished),
            prompt_ids=tuple(prompts.ids[p] for p in owner.tolist()),
            samples=torch.arange(params.n).repeat(len(prompts)),
            group=owner,
            truths=(None,) * len(rows),
            messages=((),) * len(rows),
            texts=tuple(texts),
            weights_version=torch.full((len(rows),), self.published),
        )


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def chats(template: ChatTemplate, texts: Sequence[str], **columns: Any) -> Prompts:
    """Prompts "p0", "p1"... of one user turn each, with truths 0, 1..."""
    messages = tuple(user(text) for text in texts)
    return Prompts(
        tokens=tuple(tuple(template.encode_prompt(m)) for m in messages),
        ids=tuple(f"p{i}" for i in range(len(texts))),
        truths=tuple(range(len(texts))),
        messages=messages,
        **columns,
    )


def scripted(
    template: ChatTemplate,
    said: Mapping[tuple[int, str], Sequence[str]],
    factories: Mapping[str, Callable[[], Any]],
    **limits: Any,
) -> tuple[EpisodeRollout, Speaker]:
    speaker = Speaker(template, said)
    bounds = EpisodeLimits(**{"total_tokens": 200, "step_seconds": 20.0, **limits})
    made = EpisodeRollout(speaker, speaker.complete, SamplingParams(), template, factories, bounds, seed=5)
    return made, speaker


def one(template: ChatTemplate, said: Sequence[str], turns: Sequence[Any], **limits: Any) -> tuple[Rollout, Script]:
    """One episode of one prompt."""
    script = Script(turns)
    made, _ = scripted(template, {(0, "p0"): said}, {"world": lambda: script}, **limits)
    return made.generate(chats(template, ["Hi"])), script
