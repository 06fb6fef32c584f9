"""The demo's tasks of several turns: sums with a calculator, and a number to guess.

`python -m tutelage.demo.episodes runs/environments` writes the rows, the demonstrations and an untrained model; the
recipes demo_environments_sft and demo_environments (or demo_calculator, demo_game) take it from there.

Demonstrations are those of a careless writer: the tool is often not used or misused, hints are often not heeded.  So
imitation gives a policy that knows the form and wins sometimes, and the rest is left to the reward.
Everything is a function of the seed.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from tutelage.demo.arguments import folder_and_seed
from tutelage.demo.model import build_model_folder

LOW, HIGH = 1, 9
OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", operator.add),
    "minus": ("-", operator.sub),
    "times": ("*", operator.mul),
}
THINKERS = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Lea")
CAREFUL, CALLED_WRONGLY, HEEDED = 0.45, 0.5, 0.6
"""Share of sums that are worked out; of the others, those with a wrong call (the rest guess); of hints heeded."""
LONGEST_GAME = 4


@dataclass(frozen=True)
class EpisodePaths:
    """JSON lines: demonstrations are chats; the others have prompt, truth and environment, all or those of one."""

    demonstrations: Path
    train_prompts: Path
    eval_prompts: Path
    train_sums: Path
    eval_sums: Path
    train_games: Path
    eval_games: Path
    model: Path


def write_episode_demo(dest: Path, seed: int, demonstrations: int = 3000) -> EpisodePaths:
    """Rows, demonstrations and the untrained model of the demo's episodes in the folder `dest`."""
    dest.mkdir(parents=True, exist_ok=True)
    sums, games = every_sum(), every_game()
    random.Random(f"{seed}:sums").shuffle(sums)
    held_out = sums[:40] + [row for row in games if row["prompt"].startswith(THINKERS[-2:])]
    train = sums[40:] + [row for row in games if not row["prompt"].startswith(THINKERS[-2:])]
    rng = random.Random(f"{seed}:episodes")
    chats = [demonstration(rng.choice(train), rng) for _ in range(demonstrations)]
    files = {f.name: dest / f"{f.name}.jsonl" for f in fields(EpisodePaths)}
    paths = EpisodePaths(**{**files, "model": dest / "model"})
    _write(paths.demonstrations, ({"messages": chat} for chat in chats))
    for rows, whole, some_sums, some_games in (
        (train, paths.train_prompts, paths.train_sums, paths.train_games),
        (held_out, paths.eval_prompts, paths.eval_sums, paths.eval_games),
    ):
        _write(whole, rows)
        _write(some_sums, (row for row in rows if row["environment"] == "calculator"))
        _write(some_games, (row for row in rows if row["environment"] == "guessing"))
    build_model_folder(paths.model, seed, every_text(train))
    return paths


def every_sum() -> list[dict[str, str]]:
    """Two numbers of one digit and an operation."""
    return [
        {"prompt": f"What is {a} {word} {b}?", "truth": str(function(a, b)), "environment": "calculator"}
        for word, (_, function) in OPERATIONS.items()
        for a in range(1, 10)
        for b in range(1, 10)
    ]


def every_game() -> list[dict[str, str]]:
    """Everybody thinks of every number once."""
    return [
        {
            "prompt": f"{thinker} thinks of a number from {LOW} to {HIGH}. Guess.",
            "truth": str(number),
            "environment": "guessing",
        }
        for thinker in THINKERS
        for number in range(LOW, HIGH + 1)
    ]


def demonstration(row: dict[str, str], rng: random.Random) -> list[dict[str, str]]:
    """One chat, as a careless writer has it."""
    return careless_sum(row, rng) if row["environment"] == "calculator" else careless_game(row, rng)


def careless_sum(row: dict[str, str], rng: random.Random) -> list[dict[str, str]]:
    a, word, b = row["prompt"].removeprefix("What is ").removesuffix("?").split()
    chat = [_turn("user", row["prompt"])]
    careful = rng.random() < CAREFUL
    if not careful and rng.random() >= CALLED_WRONGLY:
        return [*chat, _turn("assistant", str(rng.randint(-8, 81)))]
    chosen = word if careful else rng.choice(list(OPERATIONS))
    sign, function = OPERATIONS[chosen]
    if not careful:
        a, b = str(rng.randint(1, 9)), str(rng.randint(1, 9))
    value = str(function(int(a), int(b)))
    return [*chat, _turn("assistant", f"<calc>{a}{sign}{b}</calc>"), _turn("tool", value), _turn("assistant", value)]


def careless_game(row: dict[str, str], rng: random.Random) -> list[dict[str, str]]:
    hidden, low, high = int(row["truth"]), LOW, HIGH
    chat = [_turn("user", row["prompt"])]
    for turn in range(LONGEST_GAME):
        guess = rng.randint(low, high) if rng.random() < HEEDED else rng.randint(LOW, HIGH)
        chat.append(_turn("assistant", str(guess)))
        if guess == hidden or turn == LONGEST_GAME - 1:
            break
        chat.append(_turn("user", "higher" if guess < hidden else "lower"))
        low, high = (max(low, guess + 1), high) if guess < hidden else (low, min(high, guess - 1))
        low, high = (low, high) if low <= high else (LOW, HIGH)
    return chat


def every_text(rows: Iterable[dict[str, str]]) -> list[str]:
    """Texts that hold every word and sign in every place it can take: the tokenizer's source."""
    digits = "0123456789"
    spoken = ["tool", "higher", "lower", "error: not arithmetic", "error: the call has no </calc>"]
    spoken += ["error: division by zero", "error: too large", f"say a number from {LOW} to {HIGH}"]
    asked = [row["prompt"] for row in every_sum() + every_game()]
    return [*asked, *(row["prompt"] for row in rows), *digits, "<calc>1+2-3*4</calc>", *spoken]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write(path: Path, rows: Iterable[object]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    asked = folder_and_seed("tutelage.demo.episodes", "rows, demonstrations and an untrained model")
    made = write_episode_demo(*asked)
    print("\n".join(str(path) for path in vars(made).values()))
