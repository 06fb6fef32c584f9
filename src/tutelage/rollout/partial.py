"""Responses in progress: samples with their tokens so far, carried from one call to the next, under new weights.

Shapes: B sequences (samples), R flat response tokens.

A sample's tokens may come from several versions of the weights.  Each token keeps the logprob of the version that
sampled it, so `rollout_logp` stays the sampler's own; a sample counts the versions in segments.  When it is continued
its keys and values are computed anew from the tokens, under the new weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch

from tutelage.errors import RolloutError
from tutelage.math.keyed import sample_key
from tutelage.rollout.inprocess.stopping import Decoder, decode_rows
from tutelage.types import Prompts, Ragged, Rollout, Sequences

ShouldStop = Callable[[], bool]
"""Asked after each decode step: whether generation must stop, such as at a deadline."""


@dataclass(frozen=True)
class Sample:
    """One response and what keys its randomness; picklable, plain Python throughout.

    place     of the prompt in its batch;  sample  its index among the samples of the prompt.
    response  tokens so far;  logps  the sampler's logprob of each, from the weights that sampled it.
    versions  segments ((version, tokens), ...) in order, their tokens sum to the length of the response.
    finished  ended by an EOS, a stop token or a stop string;  False in a sample that is not done: see `Carried`.
    """

    prompt_id: str
    sample: int
    step: int
    purpose: str
    place: int
    prompt: tuple[int, ...]
    truth: Any = None
    messages: tuple[dict[str, str], ...] = ()
    response: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()
    finished: bool = False

    def extended(self, tokens: Sequence[int], logps: Sequence[float], version: int, finished: bool) -> Sample:
        """With tokens that `version` sampled added."""
        versions = self.versions
        if tokens and versions and versions[-1][0] == version:
            versions = (*versions[:-1], (version, versions[-1][1] + len(tokens)))
        elif tokens:
            versions = (*versions, (version, len(tokens)))
        return replace(
            self,
            response=(*self.response, *tokens),
            logps=(*self.logps, *logps),
            versions=versions,
            finished=finished,
        )

    @property
    def version(self) -> int:
        """Of its oldest token: what staleness is counted from.  -1 before the first token."""
        return self.versions[0][0] if self.versions else -1

    def key(self, seed: int) -> int:
        """The sample's key (`math.keyed.sample_key`)."""
        return sample_key(seed, self.step, self.prompt_id, self.sample, self.purpose)

    def position_key(self, seed: int) -> int:
        """A seed for a generator that starts at the next token: the key, and another one wherever it is continued.

        An engine that draws from a stream would otherwise repeat, after a cut, the draws of the response's start.
        """
        at = len(self.response)
        purpose = self.purpose if at == 0 else f"{self.purpose}@{at}"
        return sample_key(seed, self.step, self.prompt_id, self.sample, purpose)


@dataclass(frozen=True)
class Carried:
    """Samples that are not done, in the order they were begun; the next call continues them first."""

    samples: tuple[Sample, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def tokens(self) -> int:
        """Response tokens sampled so far."""
        return sum(len(sample.response) for sample in self.samples)

    @property
    def oldest(self) -> int | None:
        """The oldest weights that any of them holds a token of; None where no token was sampled."""
        return min((sample.version for sample in self.samples if sample.versions), default=None)

    def state(self) -> list[dict[str, Any]]:
        """Plain lists and numbers, for a checkpoint that is written as JSON (truths must be JSON themselves)."""
        return [asdict(sample) for sample in self.samples]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Carried:
        """What `state` saved, also after a trip through JSON, which turns tuples into lists."""
        rows = []
        for row in state:
            tuples = {name: tuple(row[name]) for name in ("prompt", "messages", "response", "logps")}
            versions = tuple((int(version), int(count)) for version, count in row["versions"])
            rows.append(Sample(**{**row, **tuples, "versions": versions}))
        return cls(tuple(rows))


class PartialRollout(Protocol):
    """A rollout engine that can stop before all responses are done."""

    def generate_partial(
        self,
        prompts: Prompts,
        carried: Carried | None = None,
        budget_tokens: int | None = None,
        should_stop: ShouldStop | None = None,
    ) -> tuple[Rollout, Carried]:
        """The responses that are done, carried ones first, and the rest to be carried on.

        Stops after the first decode step at which `budget_tokens` tokens were sampled in this call, or at which
        `should_stop()` is true; without either everything is done.  With no prompts (`Prompts` of length 0) it only
        continues.  A response's `weights_version` is that of its oldest token.
        """
        ...


@dataclass
class Limit:
    """Counts the tokens of one call against its budget."""

    budget_tokens: int | None = None
    should_stop: ShouldStop | None = None
    sampled: int = field(default=0)

    def reached(self) -> bool:
        if self.budget_tokens is not None and self.sampled >= self.budget_tokens:
            return True
        return self.should_stop is not None and self.should_stop()


def require_partial(prompts: Prompts, budget_tokens: int | None) -> None:
    """Raises RolloutError for greedy prompts and for a budget below 1 token."""
    if prompts.greedy:
        raise RolloutError("greedy answers in a partial rollout", fix="use generate for evaluation")
    if budget_tokens is not None and budget_tokens < 1:
        raise RolloutError(f"budget_tokens is {budget_tokens}", fix="give at least 1 token, or None for all")


def samples_of(prompts: Prompts) -> list[Sample]:
    """`prompts.n` new samples of each prompt: prompt-major, samples inside."""
    return [
        Sample(
            prompt_id=prompts.ids[p],
            sample=sample,
            step=prompts.step,
            purpose=prompts.purpose,
            place=p,
            prompt=prompts.tokens[p],
            truth=prompts.truths[p],
            messages=prompts.messages[p],
        )
        for p in range(len(prompts))
        for sample in range(prompts.n)
    ]


def bare_prompts(rows: Sequence[Sequence[int]], purpose: str = "complete") -> Prompts:
    """Rows of token ids as prompts named "0", "1"..."""
    return Prompts(
        tokens=tuple(tuple(row) for row in rows),
        ids=tuple(str(i) for i in range(len(rows))),
        truths=(None,) * len(rows),
        messages=((),) * len(rows),
        purpose=purpose,
    )


def rollout_of(
    samples: Sequence[Sample], decoder: Decoder, eos_ids: Sequence[int], response_prefix: str, version: int
) -> Rollout:
    """A batch of these samples, in this order; `version` is that of a response without tokens.

    A closing EOS is part of the tokens and not of the text; `response_prefix` is taken off the texts.
    """
    eos = set(eos_ids)
    shown = [s.response[:-1] if s.response and s.response[-1] in eos else s.response for s in samples]
    texts = decode_rows(decoder, shown, skip_special_tokens=True)
    groups: dict[tuple[int, int, str], int] = {}
    for s in samples:
        groups.setdefault((s.step, s.place, s.prompt_id), len(groups))
    lens = torch.tensor([len(s.response) for s in samples], dtype=torch.int64)
    return Rollout(
        sequences=Sequences.build([s.prompt for s in samples], [s.response for s in samples]),
        rollout_logp=Ragged(torch.tensor([x for s in samples for x in s.logps], dtype=torch.float32), lens),
        finished=torch.tensor([s.finished for s in samples], dtype=torch.bool),
        prompt_ids=tuple(s.prompt_id for s in samples),
        samples=torch.tensor([s.sample for s in samples], dtype=torch.int64),
        group=torch.tensor([groups[s.step, s.place, s.prompt_id] for s in samples], dtype=torch.int64),
        truths=tuple(s.truth for s in samples),
        messages=tuple(s.messages for s in samples),
        texts=tuple(text.removeprefix(response_prefix) for text in texts),
        weights_version=torch.tensor([s.version if s.versions else version for s in samples], dtype=torch.int64),
    )
