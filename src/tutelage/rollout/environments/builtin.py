"""Environments that need no code: a calculator as a tool, and a number to be guessed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tutelage.errors import ConfigError, DataError
from tutelage.protocols import Environment, Turn
from tutelage.rollout.environments.arithmetic import calculate, number_in, shown

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Calculator:
    """The policy may write <calc>2+3*4</calc> in a turn and reads the value in the next; a turn without one is the end.

    The last number of the closing turn is the answer; 1 where it equals the truth, else 0.  An expression that is not
    arithmetic, or a call that is not closed, is answered with what is wrong, counted as `tool_errors`, and costs
    `error_cost`.  `tool_calls` counts all.   role: of the observations; `user` for templates that know no tools.
    """

    def __init__(self, error_cost: float = 0.0, role: str = "tool") -> None:
        if error_cost < 0:
            raise ConfigError(f"calculator: error_cost is {error_cost}", fix="use 0 or more")
        self.error_cost = error_cost
        self.role = role
        self.truth = Fraction(0)

    def reset(self, messages: Sequence[Mapping[str, str]], truth: Any, seed: int) -> None:
        """Raises DataError for a row whose truth is not a number."""
        number = number_in(truth)
        if number is None:
            raise DataError(f"the truth of a row for the calculator is {truth!r}", fix="give a number as its truth")
        self.truth = number

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        pieces = text.split("<calc>")[1:]
        if not pieces:
            return Turn("", self._right(text), done=True)
        answers, errors = [], 0
        for piece in pieces:
            expression, closed, _ = piece.partition("</calc>")
            try:
                if not closed:
                    raise ValueError("the call has no </calc>")
                answers.append(shown(calculate(expression)))
            except ValueError as error:
                answers.append(f"error: {error}")
                errors += 1
        info = {"tool_calls": float(len(pieces)), "tool_errors": float(errors)}
        return Turn("\n".join(answers), -self.error_cost * errors, done=False, role=self.role, info=info)

    def _right(self, text: str) -> float:
        found = _NUMBER.findall(text)
        return float(bool(found) and number_in(found[-1]) == self.truth)


class NumberGuessing:
    """A number from `low` to `high` is guessed; a miss is answered with `higher` or `lower`.

    The hidden number is the row's truth, or drawn from the seed where the row has none.  The first number of a turn is
    the guess: 1 for a hit, minus `miss_cost` for a miss.  A turn without a number in the range is a miss too, answered
    with the range and counted as `invalid`.  `guesses` counts all turns.
    """

    def __init__(self, low: int = 1, high: int = 100, miss_cost: float = 0.0, role: str = "user") -> None:
        if not low < high:
            raise ConfigError(f"number_guessing: low is {low} and high is {high}", fix="use low below high")
        if miss_cost < 0:
            raise ConfigError(f"number_guessing: miss_cost is {miss_cost}", fix="use 0 or more")
        self.low, self.high = low, high
        self.miss_cost = miss_cost
        self.role = role
        self.hidden = low

    def reset(self, messages: Sequence[Mapping[str, str]], truth: Any, seed: int) -> None:
        """Raises DataError for a truth that is not a whole number in the range."""
        number = Fraction(random.Random(seed).randint(self.low, self.high)) if truth is None else number_in(truth)
        if number is None or number.denominator != 1 or not self.low <= number <= self.high:
            raise DataError(
                f"the truth of a row for number_guessing is {truth!r}",
                fix=f"give a whole number from {self.low} to {self.high}, or none",
            )
        self.hidden = number.numerator

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        found = _NUMBER.search(text)
        guess = number_in(found.group()) if found else None
        info = {"guesses": 1.0, "invalid": 0.0}
        if guess is None or not self.low <= guess <= self.high:
            said = f"say a number from {self.low} to {self.high}"
            return Turn(said, -self.miss_cost, done=False, role=self.role, info={**info, "invalid": 1.0})
        if guess == self.hidden:
            return Turn("", 1.0, done=True, info=info)
        said = "higher" if guess < self.hidden else "lower"
        return Turn(said, -self.miss_cost, done=False, role=self.role, info=info)


BUILT_IN: dict[str, Callable[..., Environment]] = {"calculator": Calculator, "number_guessing": NumberGuessing}
