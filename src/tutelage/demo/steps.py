"""Answers of the demo with a label for each sentence: rows for a process reward model.

`python -m tutelage.demo.steps runs/demo/data` writes them beside the demo's other data, for the recipe
demo_process_reward.  Everything is a function of the seed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from tutelage.demo.arguments import folder_and_seed
from tutelage.demo.corpus import CorpusSize, split_prompts, write_answer
from tutelage.demo.gold import gold_score

TRAIN_ROWS, EVAL_ROWS = 3000, 300
_AFTER_A_SENTENCE = re.compile(r"(?<=[.!?]) ")


def write_steps(dest: Path, seed: int, rows: tuple[int, int] = (TRAIN_ROWS, EVAL_ROWS)) -> tuple[Path, Path]:
    """steps.jsonl and eval_steps.jsonl in the folder `dest`; prompts of the second are not in the first."""
    dest.mkdir(parents=True, exist_ok=True)
    parts = split_prompts(seed, CorpusSize().eval_prompts)
    paths = dest / "steps.jsonl", dest / "eval_steps.jsonl"
    for path, prompts, count in zip(paths, parts, rows, strict=True):
        rng = random.Random(f"{seed}:{path.stem}")
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(labelled_steps(rng.choice(prompts), rng)) + "\n" for _ in range(count))
    return paths


def labelled_steps(prompt: str, rng: random.Random) -> dict[str, object]:
    """{"prompt", "completions", "labels"} of one careless answer: a sentence is right where the gold quality of the
    answer up to it is not below that of the answer before it."""
    sentences = _AFTER_A_SENTENCE.split(write_answer(prompt, rng))
    quality = [gold_score(prompt, " ".join(sentences[:end])) for end in range(1, len(sentences) + 1)]
    return {"prompt": prompt, "completions": sentences, "labels": _not_lower(quality)}


def _not_lower(quality: Sequence[float]) -> list[bool]:
    return [after >= before for before, after in zip([0.0, *quality[:-1]], quality, strict=True)]


if __name__ == "__main__":
    print(*write_steps(*folder_and_seed("tutelage.demo.steps", "answers with labelled sentences")), sep="\n")
