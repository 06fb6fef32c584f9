"""What docs/environments.md shows, run as a user would: its environment, and the demo."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tutelage.config import load_checked
from tutelage.demo.episodes import write_episode_demo
from tutelage.rollout.environments.builtin import Calculator, NumberGuessing
from tutelage.rollout.environments.loading import load_environment

DOC = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def test_the_environment_of_the_doc_plays(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# spelling\.py.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "spelling.py").write_text(code)
    assert len([line for line in code.splitlines() if line.strip()]) <= 22
    world = load_environment("spelling", "spelling.py:Spelling(tries=3)", tmp_path)()
    world.reset((), "apple", 0)
    said = [(t.observation, t.reward, t.done) for t in (world.step((), text) for text in ("aple", "appla", "apple"))]
    assert said == [("letter 3 is wrong", -0.1, False), ("letter 5 is wrong", -0.1, False), ("", 1.0, True)]
    world.reset((), "apple", 0)
    assert [world.step((), "x").done for _ in range(3)] == [False, False, True]


def test_the_demo_writes_rows_that_its_environments_take_and_words_that_its_model_knows(tmp_path: Path) -> None:
    made = write_episode_demo(tmp_path, 3, demonstrations=60)
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    rows = {name: read(path) for name, path in vars(made).items() if name != "model"}
    assert {row["environment"] for row in rows["train_prompts"]} == {"calculator", "guessing"}
    assert len(rows["train_prompts"]) == len(rows["train_sums"]) + len(rows["train_games"])
    assert not {row["prompt"] for row in rows["train_prompts"]} & {row["prompt"] for row in rows["eval_prompts"]}
    texts = [turn["content"] for row in rows["demonstrations"] for turn in row["messages"]]
    texts += [row["prompt"] for row in rows["eval_prompts"]]
    assert all(tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in texts)
    worlds = {"calculator": Calculator, "guessing": lambda: NumberGuessing(low=1, high=9)}
    for row in [*rows["train_prompts"], *rows["eval_prompts"]]:
        world = worlds[row["environment"]]()
        world.reset((), row["truth"], 0)
        assert world.step((), row["truth"]).reward == 1.0
    again = write_episode_demo(tmp_path / "again", 3, demonstrations=60)
    assert again.demonstrations.read_bytes() == made.demonstrations.read_bytes()


def test_the_recipes_of_the_demo_load() -> None:
    for name in ("demo_environments_sft", "demo_environments", "demo_calculator", "demo_game"):
        _, warnings = load_checked(name, [])
        assert warnings == []


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
