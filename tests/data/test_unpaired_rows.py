"""Single answers: the mismatched answer of each, rows made of preference pairs, steps and where they end."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tutelage.config.common import DataConfig
from tutelage.data.answers import prepare_labelled, prepare_steps, prepare_unpaired
from tutelage.data.chat import ChatTemplate
from tutelage.data.formats import convert, parse_rows
from tutelage.data.mismatch import mismatched_rows
from tutelage.data.rows import PromptOnly, Stepwise
from tutelage.data.steps import step_ends
from tutelage.errors import DataError


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data(path: str, **settings: Any) -> DataConfig:
    return DataConfig.model_validate({"train": path, "eval_fraction": 0.0, "max_bad_fraction": 1.0, **settings})


PAIRS = [{"prompt": f"what is {t}", "chosen": f"{t}!", "rejected": "no"} for t in ("tea", "rain", "snow", "bread")]


# ---- mismatched answers


@pytest.mark.parametrize("seed", range(5))
def test_every_row_gets_an_answer_of_another_prompt_and_every_answer_is_used_once(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(30):
        prompts = [chance.choice("abcdefgh") for _ in range(chance.randint(2, 24))]
        most = max(prompts.count(p) for p in prompts)
        if len(set(prompts)) < 2:
            continue
        partner = mismatched_rows(prompts, seed).tolist()
        assert all(prompts[row] != prompts[other] for row, other in enumerate(partner)), "so no fixed point either"
        if 2 * most <= len(prompts):
            assert sorted(partner) == list(range(len(prompts)))


def test_a_prompt_with_most_of_the_rows_still_gets_other_prompts_answers() -> None:
    prompts = list("aaaaabc")
    partner = mismatched_rows(prompts, 0).tolist()
    assert {prompts[i] for i in partner[:5]} == {"b", "c"}
    assert [prompts[i] for i in partner[5:]] == ["a", "a"]
    assert partner[5] != partner[6]


def test_the_pairing_depends_on_the_seed_alone() -> None:
    prompts = [str(i // 2) for i in range(40)]
    first = mismatched_rows(prompts, 7)
    assert torch.equal(first, mismatched_rows(prompts, 7))
    assert not torch.equal(first, mismatched_rows(prompts, 8))
    with pytest.raises(DataError, match="all 3 rows have one prompt"):
        mismatched_rows(["a"] * 3, 0)


# ---- unpaired rows


def test_preference_rows_become_two_rows_each_with_a_mismatched_answer(tmp_path: Path, tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    prepared = prepare_unpaired(data(write(tmp_path, PAIRS)), template, 0)
    batch = prepared.train
    assert len(batch) == 8
    assert batch.desirable.tolist() == [True, False] * 4
    own = [template.decode_response(row) for row in batch.answers.response_rows()]
    other = [template.decode_response(row) for row in batch.mismatched.response_rows()]
    assert own == [text for row in PAIRS for text in (row["chosen"], row["rejected"])]
    assert batch.answers.prompt_rows() == batch.mismatched.prompt_rows(), "the prompt stays, the answer is another's"
    for row, text in enumerate(other):
        topic = PAIRS[row // 2]["chosen"]
        assert text != topic, "never its own prompt's answer"
    assert sorted(own) == sorted(other)
    assert prepared.preflight.format == "preference"
    picked = batch.select(torch.tensor([5, 2]))
    assert [template.decode_response(row) for row in picked.mismatched.response_rows()] == [other[5], other[2]]


def test_rows_of_one_prompt_are_named_as_training_or_held_out_rows(tmp_path: Path, tiny_tokenizer: Any) -> None:
    template, train = ChatTemplate(tiny_tokenizer), write(tmp_path, PAIRS)
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "why", "chosen": "so", "rejected": "no"}) + "\n")
    with pytest.raises(DataError, match=r"^held-out rows of .*held\.jsonl: all 2 rows have one prompt"):
        prepare_unpaired(data(train, eval=str(held)), template, 0)
    with pytest.raises(DataError, match=r"^training rows of .*held\.jsonl: all 2 rows have one prompt"):
        prepare_unpaired(data(str(held)), template, 0)
    with pytest.raises(DataError, match=r"^held-out rows of .*rows\.jsonl: all 2 rows have one prompt"):
        prepare_unpaired(data(train, eval_fraction=0.25), template, 0)


def test_unpaired_rows_and_odd_ones(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [
        {"prompt": "a", "completion": "good", "label": True},
        {"prompt": "b", "completion": "bad", "label": False},
        {"prompt": "c", "completion": " ", "label": True},
    ]
    template = ChatTemplate(tiny_tokenizer)
    prepared = prepare_labelled(data(write(tmp_path, rows)), template, 0)
    assert prepared.train.desirable.tolist() == [True, False]
    assert prepared.preflight.count("empty_response") == 1
    with pytest.raises(DataError, match="cannot become labelled answers; wanted is unpaired"):
        prepare_unpaired(data(write(tmp_path, [{"prompt": "a", "completion": "b"}])), template, 0)


def test_a_mismatched_answer_is_cut_to_the_context_and_counted(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [
        {"prompt": "x" * 30, "completion": "y", "label": True},
        {"prompt": "x", "completion": "z" * 25, "label": False},
    ]
    template = ChatTemplate(tiny_tokenizer)
    longest = len(template.encode_prompt(({"role": "user", "content": "x" * 30},)))
    prepared = prepare_unpaired(data(write(tmp_path, rows)), template, 0, context=longest + 10)
    assert int(prepared.train.mismatched.tokens.lens.max()) == longest + 10
    assert int(prepared.train.answers.response_lens.max()) == 26, "the answer itself is whole"
    assert any("1 of 2 mismatched answers" in line for line in prepared.preflight.lines())


# ---- steps


def test_stepwise_rows_are_recognised_and_checked() -> None:
    row = {"prompt": "1+1+1", "completions": ["1+1=2", "2+1=3"], "labels": [True, 0.25]}
    parsed = parse_rows([row])
    assert parsed.format == "stepwise"
    assert isinstance(parsed.rows[0], Stepwise)
    assert parsed.rows[0].steps == ("1+1=2", "2+1=3")
    assert parsed.rows[0].labels == (1.0, 0.25)
    assert convert(parsed.rows[0], "prompt_only") == (PromptOnly(({"role": "user", "content": "1+1+1"},)),)
    with pytest.raises(DataError, match=r"2 completions \(steps\) and 1 labels"):
        parse_rows([{**row, "labels": [True]}])
    with pytest.raises(DataError, match="completions is str"):
        parse_rows([{**row, "completions": "1+1=2"}])


@pytest.mark.parametrize("separator", ["\n", "\n\n", "; "])
def test_a_step_ends_with_the_token_that_completes_its_separator(separator: str, tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    steps = ["1+1=2", "the sum: 2", "so you see 2"]
    ids = template.encode_response(separator.join(steps))
    ends = step_ends(tiny_tokenizer, ids, separator)
    assert len(ends) == 3
    assert ends[-1] == len(ids) - 1, "the last step ends with EOS"
    for number, end in enumerate(ends[:-1], start=1):
        before, after = (tiny_tokenizer.decode(ids[:stop]).count(separator) for stop in (end, end + 1))
        assert (before, after) == (number - 1, number), "the token that completes the separator"


def test_blank_steps_are_none_and_text_after_the_last_separator_is_one(tiny_tokenizer: Any) -> None:
    def ends(text: str, finished: bool) -> list[int]:
        return step_ends(tiny_tokenizer, ChatTemplate(tiny_tokenizer).encode_response(text, finished=finished), "\n")

    assert ends("ab\n", True) == [2], "EOS alone is no step"
    assert ends("ab", False) == [1]
    assert len(ends("ab\n \n cd\n", True)) == 2
    assert ends("\n\n", False) == [0], "a response without text is scored at its last token"
    assert step_ends(tiny_tokenizer, [], "\n") == []
    signs = ChatTemplate(tiny_tokenizer).encode_response(";;q;z")
    assert step_ends(tiny_tokenizer, signs, ";") == [3, len(signs) - 1], "a separator alone is no step"


def test_step_rows_mark_one_token_a_label(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [
        {"prompt": "1+1+1", "completions": ["1+1=2", "2+1=3"], "labels": [True, False]},
        {"prompt": "2+2", "completions": ["2+2=5"], "labels": [0.25]},
    ]
    template = ChatTemplate(tiny_tokenizer)
    prepared = prepare_steps(data(write(tmp_path, rows)), template, 0, "\n")
    batch = prepared.train
    assert [row.tolist() for row in batch.labels.rows()] == [[1.0, 0.0], [0.25]]
    assert [int(row.sum()) for row in batch.sequences.trained.rows()] == [2, 1]
    first = batch.sequences.trained.rows()[0].nonzero().squeeze(1).tolist()
    assert template.tokenizer.decode(batch.sequences.response_rows()[0][: first[0] + 1]) == "1+1=2\n"
    picked = batch.select(torch.tensor([1]))
    assert picked.labels.flat.tolist() == [0.25]


def test_a_cut_answer_keeps_the_steps_that_end_within_it(tmp_path: Path, tiny_tokenizer: Any) -> None:
    rows = [{"prompt": "q", "completions": ["abc", "de", "fghi"], "labels": [1, 0, 1]}] * 2
    limit = data(write(tmp_path, rows), max_response_tokens=8, too_long="truncate")
    batch = prepare_steps(limit, ChatTemplate(tiny_tokenizer), 0, "\n").train
    assert [row.tolist() for row in batch.labels.rows()] == [[1.0, 0.0]] * 2
    short = data(write(tmp_path, rows), max_response_tokens=2, too_long="truncate")
    with pytest.raises(DataError, match="no row is left"):
        prepare_steps(short, ChatTemplate(tiny_tokenizer), 0, "\n")


def test_labels_and_separators_that_cannot_be_used_are_told(tmp_path: Path, tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    odd = [{"prompt": "q", "completions": ["a"], "labels": [2.0]}]
    with pytest.raises(DataError, match=r"^training rows of .*rows\.jsonl: row 1 has the label 2"):
        prepare_steps(data(write(tmp_path, odd)), template, 0, "\n", allowed=lambda y: 0 <= y <= 1)
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps(odd[0]) + "\n")
    right = [{"prompt": "r", "completions": ["a"], "labels": [1.0]}]
    with pytest.raises(DataError, match=r"^held-out rows of .*held\.jsonl: row eval:1 has the label 2"):
        prepare_steps(data(write(tmp_path, right), eval=str(held)), template, 0, "\n", allowed=lambda y: 0 <= y <= 1)
    split = [
        {"prompt": "q", "completions": ["a\nb"], "labels": [1]},
        {"prompt": "q", "completions": ["a"], "labels": [1]},
    ]
    prepared = prepare_steps(data(write(tmp_path, split)), template, 0, "\n")
    assert len(prepared.train) == 1
    assert any("2 steps between separators" in line for line in prepared.preflight.lines())
