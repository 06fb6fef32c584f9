"""The calculator, the guessing game, and how a recipe names an environment."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutelage.errors import ConfigError, DataError
from tutelage.protocols import Environment
from tutelage.rollout.environments.arithmetic import calculate, number_in, shown
from tutelage.rollout.environments.builtin import BUILT_IN, Calculator, NumberGuessing
from tutelage.rollout.environments.loading import load_environment, load_environments

# ---- arithmetic


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        (" -7 // 2 ", "-4"),
        ("-7 % 3", "2"),
        ("1/3", "0.3333333333"),
        ("0.1+0.2", "0.3"),
        ("6/3", "2"),
        ("--2", "2"),
        ("1e3", "1000"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert shown(calculate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2+",
        "2**9",
        "9" * 201,
        "__import__('os')",
        "abs(3)",
        "True+1",
        "'a'*3",
        "[1][0]",
        "x",
        "1 if 2 else 3",
        "1;2",
        "1<2",
        "2j",
        "lambda: 1",
        "(" * 90 + "1",
        "1\x00",
        "~1",
        "1_0" + "0" * 40,
    ],
)
def test_what_is_not_arithmetic_is_refused_in_words(expression: str) -> None:
    with pytest.raises(ValueError, match=r"not arithmetic|longer than|too large|null"):
        calculate(expression)


def test_division_by_zero_and_growth_are_refused() -> None:
    with pytest.raises(ValueError, match="division by zero"):
        calculate("1/(2-2)")
    with pytest.raises(ValueError, match="division by zero"):
        calculate("1%0")
    with pytest.raises(ValueError, match="too large"):
        calculate("*".join(["999999999"] * 10))
    with pytest.raises(ValueError, match="too large"):
        calculate("1e999")
    with pytest.raises(ValueError, match="too large"):
        calculate("/".join(["1", *["999999999"] * 10]))


@given(st.recursive(st.integers(0, 99).map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
    lambda t: f"({t[0]}{t[1]}{t[2]})"), max_leaves=6))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_whole_numbers_agree_with_python(expression: str) -> None:
    assert calculate(expression) == Fraction(eval(expression, {"__builtins__": {}}))


def test_numbers_are_read_with_commas_and_decimals() -> None:
    assert number_in(" 1,234.5 ") == Fraction(2469, 2)
    assert number_in(7) == 7
    assert number_in("1/3") == Fraction(1, 3)
    assert number_in("seven") is None
    assert number_in(None) is None


# ---- calculator


def calculator(truth: Any = 14, **kwargs: Any) -> Calculator:
    made = Calculator(**kwargs)
    made.reset((), truth, 0)
    return made


def test_a_call_is_answered_and_a_turn_without_one_is_judged() -> None:
    world: Environment = calculator()
    first = world.step((), "I need <calc>2+3*4</calc>")
    assert (first.observation, first.reward, first.done, first.role) == ("14", 0.0, False, "tool")
    assert first.info == {"tool_calls": 1.0, "tool_errors": 0.0}
    last = world.step((), "2+3*4 = 14")
    assert (last.observation, last.reward, last.done) == ("", 1.0, True)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("14", 1.0), ("it is 14.", 1.0), ("14.0", 1.0), ("not 13, 14", 1.0), ("14 or 15", 0.0), ("", 0.0), ("x", 0.0)],
)
def test_the_last_number_is_the_answer(text: str, reward: float) -> None:
    assert calculator().step((), text).reward == reward


def test_tool_errors_are_said_counted_and_cost() -> None:
    turn = calculator(error_cost=0.25).step((), "<calc>2**3</calc> <calc>1+1</calc> <calc>5")
    assert turn.observation == "error: not arithmetic\n2\nerror: the call has no </calc>"
    assert turn.info == {"tool_calls": 3.0, "tool_errors": 2.0}
    assert turn.reward == -0.5
    assert not turn.done


def test_a_row_without_a_number_as_truth_cannot_begin() -> None:
    with pytest.raises(DataError, match="truth of a row for the calculator is None"):
        calculator(truth=None)


# ---- guessing


def test_hints_lead_to_the_hidden_number() -> None:
    world = NumberGuessing(low=1, high=9, miss_cost=0.1)
    world.reset((), "7", 0)
    said = [(t.observation, t.reward, t.done) for t in (world.step((), text) for text in ("5", "8", "I say 7!"))]
    assert said == [("higher", -0.1, False), ("lower", -0.1, False), ("", 1.0, True)]


def test_a_turn_that_is_no_guess_is_a_miss() -> None:
    world = NumberGuessing(low=1, high=9)
    world.reset((), 7, 0)
    for text in ("hello", "", "12", "-7", "7.5x"):
        turn = world.step((), text)
        assert not turn.done
        if text != "7.5x":
            assert turn.observation == "say a number from 1 to 9"
            assert turn.info == {"guesses": 1.0, "invalid": 1.0}


def test_bisection_always_wins_in_seven_turns_whatever_the_seed() -> None:
    drawn = set()
    for seed in range(40):
        world = NumberGuessing()
        world.reset((), None, seed)
        drawn.add(world.hidden)
        low, high = 1, 100
        for _ in range(math.ceil(math.log2(100))):
            guess = (low + high) // 2
            turn = world.step((), str(guess))
            if turn.done:
                break
            low, high = (guess + 1, high) if turn.observation == "higher" else (low, guess - 1)
        assert turn.done
    assert len(drawn) > 20
    again = NumberGuessing()
    again.reset((), None, 39)
    assert again.hidden == random.Random(39).randint(1, 100)


@pytest.mark.parametrize("truth", ["x", 0, 101, 2.5])
def test_a_truth_outside_the_range_cannot_begin(truth: Any) -> None:
    with pytest.raises(DataError, match="whole number from 1 to 100"):
        NumberGuessing().reset((), truth, 0)


# ---- names in a recipe


def test_built_in_ones_with_and_without_settings() -> None:
    made = load_environments({"tool": "calculator", "game": "number_guessing(low=3, high=5)"})
    assert list(made) == ["tool", "game"]
    first, second = made["tool"](), made["tool"]()
    assert isinstance(first, Calculator)
    assert first is not second, "an episode has its own"
    game = made["game"]()
    assert isinstance(game, NumberGuessing)
    assert (game.low, game.high) == (3, 5)
    assert set(BUILT_IN) == {"calculator", "number_guessing"}


def test_a_file_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "worlds.py").write_text(
        "from tutelage.protocols import Turn\n"
        "class Echo:\n"
        "    def __init__(self, times=1):\n"
        "        self.times = times\n"
        "    def reset(self, messages, truth, seed):\n"
        "        pass\n"
        "    def step(self, tokens, text):\n"
        "        return Turn('', float(self.times), True)\n"
        "class Half:\n"
        "    def reset(self, messages, truth, seed):\n"
        "        pass\n"
    )
    assert load_environment("echo", "worlds.py:Echo(times=3)", tmp_path)().step((), "").reward == 3.0
    with pytest.raises(ConfigError, match=r"environment.functions.half: .* made a Half without step"):
        load_environment("half", "worlds.py:Half", tmp_path)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("calculater", r"Did you mean calculator\?"),
        ("zzz", r"Built in are calculator, number_guessing\."),
        ("calculator(3)", "only key=value settings"),
        ("calculator(error_cost=os)", "cannot be read"),
        ("calculator(cost=1)", "cannot be made: TypeError: .*cost"),
        ("calculator(error_cost=-1)", "error_cost is -1"),
        ("number_guessing(low=9, high=2)", "low is 9 and high is 2"),
        ("no.such.module:x", "importing no.such.module failed"),
        ("tutelage.errors:nothing", "holds nothing named 'nothing'"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_environment("world", spec)
