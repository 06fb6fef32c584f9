"""The gold quality: values worked out by hand from its published terms, and the shape of each term."""

from __future__ import annotations

import random

import pytest

from tutelage.demo.gold import HIGHEST, LOWEST, count_polite, gold_score, gold_terms
from tutelage.demo.language import (
    ALL_DETAILS,
    BODIES,
    DETAILS,
    FILLERS,
    POLITE_PHRASES,
    RUDE_SENTENCES,
    every_prompt,
    words,
)

CATS = "Tell me about cats."


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("You need naps.", 1.0),  # one detail of cats
        ("You need naps, fish and toys.", 3.0),  # three
        ("You need naps, fish, toys and cushions.", 3.0),  # a fourth adds nothing
        ("Great question! You need naps, fish and toys.", 4.0),  # 3 + 1 polite: the best there is
        ("Great question! You need naps. Good luck!", 1.0),  # 1 + (1 - 1)
        ("Great question! Happy to help! Good luck! You need naps.", 0.0),  # 1 + (1 - 2)
        ("You need yeast.", -1.0),  # belongs to bread
        ("You need naps and yeast.", 0.0),  # 1 - 1
        ("You need naps and naps.", 0.5),  # 1 - 1/2
        ("You need naps, naps and naps.", 0.0),  # 1 - 2/2
        ("Great question! Great question!", -0.5),  # (1 - 1) for politeness, -1/2 for the second "great"
        ("What a silly thing. You need naps.", 0.0),  # 1 - 1
        ("You need naps", 0.0),  # 1 - 1: the sentence does not end
        ("It depends.", 0.0),
        ("", -1.0),  # nothing said, nothing ended
        ("You need naps. " + "It depends. " * 8, 0.625),  # 3 + 16 words, three after the 16th: 1 - 3/8
    ],
)
def test_gold_hand_values(response: str, expected: float) -> None:
    assert gold_score(CATS, response) == pytest.approx(expected, abs=1e-12)


def test_every_term_by_hand_in_one_bad_answer() -> None:
    terms = gold_terms(
        CATS, "Good luck! Enjoy your day! You lazy need naps, fish, naps, yeast and many more of the other things and"
    )
    # 20 words: good luck enjoy your day you lazy need naps fish naps yeast and many more of the other things and
    assert terms.as_dict() == {
        "relevance": 2.0,
        "off_topic": -1.0,
        "politeness": 0.0,
        "rudeness": -1.0,
        "repetition": -0.5,
        "rambling": -0.5,
        "ending": -1.0,
    }
    assert terms.total == pytest.approx(-2.0)


def test_relevance_rises_then_stops() -> None:
    details = DETAILS["cats"]
    gains = [gold_terms(CATS, f"You need {', '.join(details[:n])}.").relevance for n in range(len(details) + 1)]
    assert gains == [0.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0]


def test_politeness_rises_then_falls() -> None:
    points = [gold_terms(CATS, " ".join(POLITE_PHRASES[:n])).politeness for n in range(5)]
    assert points == [0.0, 1.0, 0.0, -1.0, -2.0]


@pytest.mark.parametrize("sentence", ["You need fish.", "Great question!", "You need salt.", "Do not be lazy."])
def test_saying_it_again_and_again_never_helps_after_the_first_time(sentence: str) -> None:
    scores = [gold_score(CATS, " ".join([sentence] * n)) for n in range(1, 12)]
    assert scores == sorted(scores, reverse=True)
    assert scores[1] < scores[0]
    assert scores[-1] <= -2.0


def test_an_answer_is_judged_against_its_own_topic() -> None:
    answer = "You need flour, yeast and salt."
    assert gold_score("Tell me about bread.", answer) == 3.0
    assert gold_score(CATS, answer) == -3.0


def test_gold_stays_within_its_bounds_on_random_word_salad() -> None:
    rng = random.Random(0)
    pool = sorted(
        {word for prompt in every_prompt() for word in words(prompt)} | {"lazy", "salt", "naps", "great", "."}
    )
    scores = [
        gold_score(rng.choice(every_prompt()), " ".join(rng.choices(pool, k=rng.randrange(60)))) for _ in range(300)
    ]
    assert LOWEST <= min(scores) <= max(scores) <= HIGHEST
    assert gold_score(CATS, "lazy " * 50) == LOWEST


def test_no_polite_phrase_hides_in_another() -> None:
    for phrase in POLITE_PHRASES:
        assert count_polite(words(phrase)) == 1
    assert count_polite(words(" ".join(POLITE_PHRASES))) == len(POLITE_PHRASES)
    assert count_polite(words("great happy question to help")) == 0


def test_every_topic_has_a_perfect_answer() -> None:
    for topic, details in DETAILS.items():
        answer = f"Happy to help! You need {details[0]}, {details[1]} and {details[2]}."
        assert gold_score(f"Any advice about {topic}?", answer) == HIGHEST


def test_each_detail_belongs_to_one_topic_and_is_no_other_word_of_an_answer() -> None:
    other = {word for text in (*BODIES, *FILLERS, *POLITE_PHRASES, *RUDE_SENTENCES) for word in words(text)}
    assert not other & set(ALL_DETAILS)
    assert len(set(ALL_DETAILS)) == len(ALL_DETAILS) == sum(len(details) for details in DETAILS.values())
