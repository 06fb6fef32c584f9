"""The demo corpus: demonstrations of mixed quality, noisy preference pairs, prompts to train on and to hold out.

Everything is a function of the seed: the same seed writes the same bytes on any machine.
"""

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
from tutelage.errors import DataError

DETAIL_COUNT_WEIGHTS: dict[int, float] = {0: 0.20, 1: 0.35, 2: 0.30, 3: 0.15}
OFF_TOPIC_RATE = 0.10
POLITE_OPENER_RATE = 0.30
POLITE_CLOSER_RATE = 0.15
RUDE_RATE = 0.15


@dataclass(frozen=True)
class CorpusSize:
    """How many rows each file gets; the `eval_prompts` are held out of all that is trained on."""

    demonstrations: int = 4000
    preferences: int = 3000
    eval_preferences: int = 300
    eval_prompts: int = 128


@dataclass(frozen=True)
class CorpusPaths:
    """Where the files of one corpus are; all are JSON lines of chat messages."""

    demonstrations: Path
    preferences: Path
    eval_preferences: Path
    train_prompts: Path
    eval_prompts: Path


def split_prompts(seed: int, n_eval: int) -> tuple[list[str], list[str]]:
    """Every prompt of the language, shuffled and cut into (train, eval); no prompt is in both.

    Raises DataError unless both parts hold at least one prompt.
    """
    prompts = every_prompt()
    if not 0 < n_eval < len(prompts):
        raise DataError(
            f"{n_eval} evaluation prompts cannot be held out of the {len(prompts)} prompts of the demo language.",
            fix=f"Hold out between 1 and {len(prompts) - 1}.",
        )
    random.Random(f"{seed}:split").shuffle(prompts)
    return prompts[n_eval:], prompts[:n_eval]


def write_answer(prompt: str, rng: random.Random) -> str:
    """One answer as a careless writer gives it: 0 to 3 details, some of them off the topic, polite, rude or neither.

    A detail is never said twice and an answer has at most two polite phrases, so what repetition does to quality is
    not in the corpus.
    """
    topic = topic_of(prompt)
    if topic is None:
        raise DataError(f"The prompt names no topic of the demo language: {prompt!r}.", fix="Use a generated prompt.")
    details = _choose_details(topic, rng)
    sentences = []
    if rng.random() < POLITE_OPENER_RATE:
        sentences.append(rng.choice(POLITE_OPENERS))
    elif rng.random() < RUDE_RATE:
        sentences.append(rng.choice(RUDE_SENTENCES))
    if details:
        sentences.append(rng.choice(BODIES).format(details=join_details(details)))
    else:
        sentences.append(rng.choice(FILLERS))
    if rng.random() < POLITE_CLOSER_RATE:
        sentences.append(rng.choice(POLITE_CLOSERS))
    return " ".join(sentences)


def join_details(details: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    return details[0] if len(details) == 1 else f"{', '.join(details[:-1])} and {details[-1]}"


def write_corpus(dest: Path, seed: int, size: CorpusSize | None = None, label_temperature: float = 1.0) -> CorpusPaths:
    """Write the whole corpus of one seed into the folder `dest` and say where each file is.

    demonstrations     {"messages": [user, assistant]}, prompts drawn from the train part
    preferences        {"prompt": [user], "chosen": [assistant], "rejected": [assistant]}, prompts from the train part
    eval_preferences   the same, prompts from the held-out part; its labels are as noisy
    train_prompts      {"prompt": [user]}, each once;  eval_prompts the same for the held-out part

    label_temperature is that of `labels.label_pairs`, in points of gold. Pairs of equal answers are drawn again, so
    the counts are exact. Raises DataError for an impossible split or temperature.
    """
    size = size or CorpusSize()
    train, held_out = split_prompts(seed, size.eval_prompts)
    paths = CorpusPaths(
        demonstrations=dest / "demonstrations.jsonl",
        preferences=dest / "preferences.jsonl",
        eval_preferences=dest / "eval_preferences.jsonl",
        train_prompts=dest / "train_prompts.jsonl",
        eval_prompts=dest / "eval_prompts.jsonl",
    )
    dest.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{seed}:demonstrations")
    demonstrations = [(prompt, write_answer(prompt, rng)) for prompt in rng.choices(train, k=size.demonstrations)]
    _write_rows(paths.demonstrations, ({"messages": [*_user(p), *_assistant(a)]} for p, a in demonstrations))
    for path, prompts, count in (
        (paths.preferences, train, size.preferences),
        (paths.eval_preferences, held_out, size.eval_preferences),
    ):
        write_preferences(path, _draw_pairs(prompts, count, f"{seed}:{path.stem}", seed, label_temperature))
    _write_rows(paths.train_prompts, ({"prompt": _user(p)} for p in train))
    _write_rows(paths.eval_prompts, ({"prompt": _user(p)} for p in held_out))
    return paths


def write_preferences(path: Path, pairs: Iterable[PreferencePair]) -> None:
    """Write labelled pairs as JSON lines of chat messages with the columns prompt, chosen, rejected."""
    _write_rows(
        path,
        (
            {"prompt": _user(pair.prompt), "chosen": _assistant(pair.chosen), "rejected": _assistant(pair.rejected)}
            for pair in pairs
        ),
    )


def _draw_pairs(prompts: Sequence[str], count: int, key: str, seed: int, temperature: float) -> list[PreferencePair]:
    rng = random.Random(key)
    asked: list[str] = []
    first: list[str] = []
    second: list[str] = []
    while len(asked) < count:
        prompt = rng.choice(prompts)
        a, b = write_answer(prompt, rng), write_answer(prompt, rng)
        if a != b:
            asked.append(prompt)
            first.append(a)
            second.append(b)
    return label_pairs(asked, first, second, seed, temperature)


def _choose_details(topic: str, rng: random.Random) -> list[str]:
    count = rng.choices(list(DETAIL_COUNT_WEIGHTS), weights=list(DETAIL_COUNT_WEIGHTS.values()))[0]
    details: list[str] = []
    while len(details) < count:
        source = rng.choice(TOPICS) if rng.random() < OFF_TOPIC_RATE else topic
        detail = rng.choice(DETAILS[source])
        if detail not in details:
            details.append(detail)
    return details


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
