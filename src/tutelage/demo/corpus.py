"""The demo corpus: demonstrations of mixed quality, noisy preference pairs, prompts to train on and to hold out."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutelage.demo.labels import PreferencePair, label_pairs
from tutelage.demo.language import (
    BODIES,
    DETAILS,
    FILLERS,
    POLITE_CLOSERS,
    POLITE_OPENERS,
    RUDE_SENTENCES,
    TOPICS,
    every_prompt,
    topic_of,
)

DETAIL_COUNTS = {0: 0.20, 1: 0.35, 2: 0.30, 3: 0.15}
OFF_TOPIC_RATE = 0.30
POLITE_OPENER_RATE = 0.30
POLITE_CLOSER_RATE = 0.15
RUDE_RATE = 0.15


@dataclass(frozen=True)
class CorpusPaths:
    demonstrations: Path
    preferences: Path
    preferences_eval: Path
    train_prompts: Path
    eval_prompts: Path


def split_prompts(seed: int, n_eval: int) -> tuple[list[str], list[str]]:
    prompts = every_prompt()
    random.Random(f"{seed}:split").shuffle(prompts)
    return prompts[n_eval:], prompts[:n_eval]


def join_details(details: Sequence[str]) -> str:
    return details[0] if len(details) == 1 else f"{', '.join(details[:-1])} and {details[-1]}"


def write_answer(prompt: str, rng: random.Random) -> str:
    topic = topic_of(prompt)
    assert topic is not None
    n = rng.choices(list(DETAIL_COUNTS), weights=list(DETAIL_COUNTS.values()))[0]
    details: list[str] = []
    while len(details) < n:
        source = topic if rng.random() >= OFF_TOPIC_RATE else rng.choice(TOPICS)
        detail = rng.choice(DETAILS[source])
        if detail not in details:
            details.append(detail)
    sentences = []
    if rng.random() < POLITE_OPENER_RATE:
        sentences.append(rng.choice(POLITE_OPENERS))
    elif rng.random() < RUDE_RATE:
        sentences.append(rng.choice(RUDE_SENTENCES))
    if not details:
        sentences.append(rng.choice(FILLERS))
    else:
        sentences.append(rng.choice(BODIES).format(details=join_details(details)))
    if rng.random() < POLITE_CLOSER_RATE:
        sentences.append(rng.choice(POLITE_CLOSERS))
    return " ".join(sentences)
