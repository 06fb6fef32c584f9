"""The corpus generator: deterministic, split by prompt, of the qualities its docstring claims."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from tutelage.demo.corpus import CorpusSize, join_details, split_prompts, write_answer, write_corpus
from tutelage.demo.gold import count_polite, gold_terms
from tutelage.demo.language import DETAILS, every_prompt, topic_of, words
from tutelage.errors import DataError

SIZE = CorpusSize(demonstrations=300, preferences=200, eval_preferences=50, eval_prompts=64)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_seed_writes_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        write_corpus(tmp_path / name, seed, SIZE)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert all(a[name] != c[name] for name in a)


def test_the_bytes_do_not_depend_on_the_hash_seed_of_the_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tutelage.demo.corpus import CorpusSize, write_corpus\n"
        f"write_corpus(Path(sys.argv[1]), 5, CorpusSize{astuple(SIZE)})\n"
        "assert 'torch' not in sys.modules, 'the generator loads torch'"
    )
    for hash_seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / hash_seed)],
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_files_have_the_rows_and_columns_that_were_asked_for(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, 0, SIZE)
    demonstrations, preferences = rows(paths.demonstrations), rows(paths.preferences)
    assert (len(demonstrations), len(preferences), len(rows(paths.eval_preferences))) == (300, 200, 50)
    assert len(rows(paths.eval_prompts)) == 64
    assert len(rows(paths.train_prompts)) == len(every_prompt()) - 64
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in demonstrations)
    for row in preferences:
        assert list(row) == ["prompt", "chosen", "rejected"]
        assert [m["role"] for m in row["prompt"]] == ["user"]
        assert row["chosen"] != row["rejected"]


def test_no_prompt_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, 0, SIZE)
    trained = {row["messages"][0]["content"] for row in rows(paths.demonstrations)}
    for path in (paths.preferences, paths.train_prompts):
        trained |= {row["prompt"][0]["content"] for row in rows(path)}
    held_out = {row["prompt"][0]["content"] for p in (paths.eval_preferences, paths.eval_prompts) for row in rows(p)}
    assert trained
    assert held_out
    assert not trained & held_out


def test_prompts_of_the_language_are_different_and_each_names_one_topic() -> None:
    prompts = every_prompt()
    assert len(set(prompts)) == len(prompts) == 12 * 6 * 8
    assert all(sum(word in DETAILS for word in words(prompt)) == 1 for prompt in prompts)
    assert Counter(topic_of(prompt) for prompt in prompts) == dict.fromkeys(DETAILS, 48)


@pytest.mark.parametrize("n_eval", [0, 576, 1000])
def test_an_impossible_split_is_refused(n_eval: int) -> None:
    with pytest.raises(DataError, match=f"{n_eval} evaluation prompts"):
        split_prompts(0, n_eval)


def test_a_prompt_without_a_topic_is_refused() -> None:
    with pytest.raises(DataError, match="Tell me about whales"):
        write_answer("Tell me about whales.", random.Random(0))


def test_joined_details_read_like_a_list() -> None:
    assert join_details(["fish"]) == "fish"
    assert join_details(["fish", "toys"]) == "fish and toys"
    assert join_details(["fish", "toys", "naps"]) == "fish, toys and naps"


def test_answers_are_of_mixed_quality_and_never_repeat_a_detail() -> None:
    rng = random.Random(0)
    answers = [(prompt, write_answer(prompt, rng)) for prompt in every_prompt() * 3]
    terms = [gold_terms(prompt, answer) for prompt, answer in answers]
    assert {t.relevance for t in terms} == {0.0, 1.0, 2.0, 3.0}
    assert {t.politeness for t in terms} == {0.0, 1.0}
    assert any(t.off_topic < 0 for t in terms)
    assert any(t.rudeness < 0 for t in terms)
    assert all(t.ending == 0.0 and t.rambling == 0.0 and t.repetition == 0.0 for t in terms)
    assert max(count_polite(words(answer)) for _, answer in answers) == 2
