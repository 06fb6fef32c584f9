"""How a rule is called, by its signature: on all responses or on each, and with what.  Torch-free.

    (prompts, responses, truths)       all responses at once; one float for each, in their order
    (response, truth, ...)             a rule with a parameter named `response` is called for each response, by keyword
    async def                          either of them; of the second kind, several run at once

Each response may be asked for: prompt, messages, response, truth, tokens (how many the policy produced), finished (it
ended by itself).  A rule on all responses may name `messages`, `tokens` and `finished` besides: lists.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from tutelage.errors import RewardError
from tutelage.rewards.loading import REWARD_RULE

BESIDES = ("messages", "tokens", "finished")
ONE = {
    "prompt": "prompts",
    "messages": "messages",
    "response": "responses",
    "truth": "truths",
    "tokens": "tokens",
    "finished": "finished",
}
"""What a rule on one response may name -> the column of `Columns`."""


@dataclass(frozen=True)
class Columns:
    """What rules may see of N responses; every column has N entries."""

    prompts: Sequence[str]
    messages: Sequence[Any]
    responses: Sequence[str]
    truths: Sequence[Any]
    tokens: Sequence[int]
    finished: Sequence[bool]

    def __len__(self) -> int:
        return len(self.responses)

    def select(self, rows: Sequence[int]) -> Columns:
        return Columns(**{f.name: [getattr(self, f.name)[row] for row in rows] for f in fields(self)})


@dataclass(frozen=True)
class Manner:
    """each: one response a call.  asynchronous: the call must be awaited.  names: what is passed by keyword."""

    each: bool
    asynchronous: bool
    names: tuple[str, ...]

    def arguments(self, columns: Columns, row: int = 0) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of one call."""
        if self.each:
            return [], {name: getattr(columns, ONE[name])[row] for name in self.names}
        return (
            [list(columns.prompts), list(columns.responses), list(columns.truths)],
            {name: list(getattr(columns, name)) for name in self.names},
        )


def manner_of(rule: Any, spec: str, what: str = REWARD_RULE) -> Manner:
    """Raises RewardError for a rule on one response that asks for something unknown."""
    asynchronous = inspect.iscoroutinefunction(rule) or inspect.iscoroutinefunction(type(rule).__call__)
    try:
        parameters = inspect.signature(rule).parameters
    except ValueError:  # a function of C without a signature
        return Manner(False, asynchronous, ())
    if "response" not in parameters:
        return Manner(False, asynchronous, tuple(name for name in list(parameters)[3:] if name in BESIDES))
    unknown = [
        name
        for name, parameter in parameters.items()
        if name not in ONE
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if unknown:
        raise RewardError(
            f"{what} {spec!r} is called for each response, and asks for {', '.join(unknown)}",
            fix=f"a rule on one response may name {', '.join(ONE)}",
        )
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return Manner(True, asynchronous, tuple(name for name in ONE if everything or name in parameters))


@dataclass(frozen=True)
class Outcome:
    """What a rule made of one response: a value, or what went wrong.

    error   "" or a few words that read on: "failed on", "returned nan for", "took more than 2 s on".
    detail  what is said after the name of the row.     fix: what the rule itself proposes, if anything.
    """

    value: float = float("nan")
    error: str = ""
    detail: str = ""
    fix: str = ""


def read(value: Any) -> Outcome:
    """A rule's answer for one response; NaN and infinity are errors, as is what is no number."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        return Outcome(error=f"returned {short(value)}, a {type(value).__name__}, for")
    number = float(value)
    if number - number != 0:
        return Outcome(error=f"returned {number} for")
    return Outcome(number)


def failed(error: BaseException) -> Outcome:
    """What a rule raised."""
    detail = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
    return Outcome(error="failed on", detail=str(detail), fix=str(getattr(error, "fix", "")))


def late(seconds: float) -> Outcome:
    return Outcome(error=f"took more than {seconds:g} s on", fix="raise the rule's seconds, or make it faster")


def read_all(result: Any, count: int) -> list[Outcome] | str:
    """A rule's answers for all responses, or what is wrong with the whole of them."""
    values = result.tolist() if hasattr(result, "tolist") else result
    if isinstance(values, str | bytes | dict | set) or not isinstance(values, Sequence):
        return f"returned a {type(result).__name__}: {short(result)}"
    if len(values) != count:
        return f"returned {len(values)} scores for {count} responses"
    return [read(value) for value in values]


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
