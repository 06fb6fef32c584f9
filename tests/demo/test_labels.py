"""Preference labels: the rate of wrong ones is the Bradley–Terry formula's, within a binomial interval."""

from __future__ import annotations

import math

import pytest

from tutelage.demo.labels import label_pairs, preference_probability
from tutelage.errors import DataError

PROMPT = "Tell me about cats."
ANSWERS = {1.0: "You need naps.", 2.0: "You need naps and fish.", 3.0: "You need naps, fish and toys."}


@pytest.mark.parametrize(
    ("difference", "temperature", "expected"),
    [(0.0, 1.0, 0.5), (math.log(3.0), 1.0, 0.75), (-math.log(3.0), 1.0, 0.25), (math.log(9.0), 2.0, 0.75)],
)
def test_preference_probability_hand_values(difference: float, temperature: float, expected: float) -> None:
    assert preference_probability(2.0 + difference, 2.0, temperature) == pytest.approx(expected, abs=1e-12)


def test_preference_probability_does_not_overflow() -> None:
    assert preference_probability(-4.0, 4.0, 1e-4) == 0.0
    assert preference_probability(4.0, -4.0, 1e-4) == 1.0


@pytest.mark.parametrize("better", [2.0, 3.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("swapped", [False, True])
def test_wrong_labels_come_at_the_bradley_terry_rate(better: float, temperature: float, swapped: bool) -> None:
    n = 4000
    best, worst = [ANSWERS[better]] * n, [ANSWERS[1.0]] * n
    first, second = (worst, best) if swapped else (best, worst)
    pairs = label_pairs([PROMPT] * n, first, second, seed=3, temperature=temperature)
    wrong = sum(pair.chosen == ANSWERS[1.0] for pair in pairs)
    rate = 1.0 / (1.0 + math.exp((better - 1.0) / temperature))
    # 4 standard deviations: 1 in 16,000 for each case; the seed is fixed, so this never flickers.
    assert abs(wrong - n * rate) < 4.0 * math.sqrt(n * rate * (1.0 - rate))


def test_labels_are_a_function_of_the_seed() -> None:
    n = 200
    arguments = ([PROMPT] * n, [ANSWERS[1.0]] * n, [ANSWERS[2.0]] * n)
    assert label_pairs(*arguments, seed=1) == label_pairs(*arguments, seed=1)
    assert label_pairs(*arguments, seed=1) != label_pairs(*arguments, seed=2)


def test_equal_answers_are_left_out_and_do_not_move_the_other_labels() -> None:
    n = 200
    a, b = [ANSWERS[1.0]] * n, [ANSWERS[2.0]] * n
    whole = label_pairs([PROMPT] * n, a, b, seed=1)
    b[0] = a[0]
    assert label_pairs([PROMPT] * n, a, b, seed=1) == whole[1:]


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(DataError, match="2 prompts, 1 first and 1 second"):
        label_pairs([PROMPT, PROMPT], ["It depends."], ["You need naps."], seed=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(DataError, match="temperature"):
        label_pairs([PROMPT], ["It depends."], ["You need naps."], seed=0, temperature=temperature)
