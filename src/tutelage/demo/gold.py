"""The gold quality of an answer in the demo task: a closed form on words, which no training code may import.

Every term can be checked by eye on the text. Good answers name a few details that belong to the topic, are polite
once, repeat nothing and finish their sentence; most terms rise at first and then turn, as people's judgements do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tutelage.demo.language import ALL_DETAILS, DETAILS, POLITE_PHRASES, RUDE_WORDS, topic_of, words

LOWEST, HIGHEST = -4.0, 4.0
ENOUGH_DETAILS = 3
ENOUGH_WORDS = 16

_POLITE = tuple(tuple(words(phrase)) for phrase in POLITE_PHRASES)
_SAID_ONCE = frozenset(ALL_DETAILS) | frozenset(phrase[0] for phrase in _POLITE)


@dataclass(frozen=True)
class GoldTerms:
    """The terms of the gold quality, in points; `total` is their sum held within [-4, 4]."""

    relevance: float
    off_topic: float
    politeness: float
    rudeness: float
    repetition: float
    rambling: float
    ending: float

    @property
    def total(self) -> float:
        return max(LOWEST, min(HIGHEST, sum(self.as_dict().values())))

    def as_dict(self) -> dict[str, float]:
        return {name: float(getattr(self, name)) for name in self.__dataclass_fields__}


def count_polite(spoken: list[str]) -> int:
    """How many polite phrases a word list holds; no phrase is part of another, so each is counted once."""
    return sum(
        tuple(spoken[start : start + len(phrase)]) == phrase for start in range(len(spoken)) for phrase in _POLITE
    )


def gold_terms(prompt: str, response: str) -> GoldTerms:
    """The terms of the gold quality of `response`, plain text, as an answer to the user turn `prompt`.

    relevance    1 point for each different detail of the asked topic, 3 at most
    off_topic    -1 for each different detail that belongs to another topic
    politeness   1 for one polite phrase; each further one takes 1 away: p -> min(p, 1) - max(p - 1, 0)
    rudeness     -1 for each rude word
    repetition   -1/2 for each time a detail, or the first word of a polite phrase, is said again
    rambling     -1/8 for each word after the 16th
    ending       0 when the answer ends with `.`, `!` or `?`, else -1
    """
    spoken = words(response)
    counts = Counter(spoken)
    topic = topic_of(prompt)
    wanted = frozenset(DETAILS[topic]) if topic is not None else frozenset()
    said = frozenset(counts) & frozenset(ALL_DETAILS)
    polite = count_polite(spoken)
    repeats = sum(count - 1 for word, count in counts.items() if word in _SAID_ONCE)
    return GoldTerms(
        relevance=1.0 * min(len(said & wanted), ENOUGH_DETAILS),
        off_topic=-1.0 * len(said - wanted),
        politeness=1.0 * (min(polite, 1) - max(polite - 1, 0)),
        rudeness=-1.0 * sum(counts[word] for word in RUDE_WORDS),
        repetition=-0.5 * repeats,
        rambling=-0.125 * max(len(spoken) - ENOUGH_WORDS, 0),
        ending=0.0 if response.rstrip().endswith((".", "!", "?")) else -1.0,
    )


def gold_score(prompt: str, response: str) -> float:
    """The gold quality in [-4, 4]: the sum of `gold_terms`, held within the bounds. Higher is better."""
    return gold_terms(prompt, response).total
