"""Preference labels from the gold quality, with the noise of a Bradley–Terry judge."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tutelage.demo.gold import gold_score
from tutelage.errors import DataError


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, as a noisy judge ordered them."""

    prompt: str
    chosen: str
    rejected: str


def preference_probability(gold_a: float, gold_b: float, temperature: float) -> float:
    """The chance that the judge prefers a over b.

    P(a > b) = sigmoid((gold_a - gold_b) / temperature)   (Bradley and Terry 1952)

    temperature > 0, in points of gold: near 0 the judge is never wrong, large and the labels are coin tosses.
    """
    x = (gold_a - gold_b) / temperature
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def label_pairs(
    prompts: Sequence[str],
    responses_a: Sequence[str],
    responses_b: Sequence[str],
    seed: int,
    temperature: float = 1.0,
) -> list[PreferencePair]:
    """One noisy label for each pair of different answers; pairs of equal answers carry no preference and are left out.

    The label of pair i depends on (seed, i) and the texts alone. Raises DataError when the lists differ in length or
    the temperature is not positive.
    """
    if not len(prompts) == len(responses_a) == len(responses_b):
        raise DataError(
            f"{len(prompts)} prompts, {len(responses_a)} first and {len(responses_b)} second answers cannot be paired.",
            fix="Give one first and one second answer for each prompt.",
        )
    if not temperature > 0:
        raise DataError(f"The label temperature is {temperature}.", fix="Use a temperature above 0.")
    pairs = []
    for index, (prompt, a, b) in enumerate(zip(prompts, responses_a, responses_b, strict=True)):
        if a == b:
            continue
        chance = preference_probability(gold_score(prompt, a), gold_score(prompt, b), temperature)
        a_wins = random.Random(f"{seed}:label:{index}").random() < chance
        pairs.append(PreferencePair(prompt, a, b) if a_wins else PreferencePair(prompt, b, a))
    return pairs
