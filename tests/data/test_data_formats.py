"""Formats: recognised over every row, parsed into typed rows, converted where that makes sense."""

from __future__ import annotations

from typing import Any

import pytest

from tutelage.data.formats import FORMATS, conversions, convert, detect, parse_dialogue, parse_rows
from tutelage.data.rows import (
    Conversation,
    Preference,
    PromptCompletion,
    PromptOnly,
    Stepwise,
    Text,
    Unpaired,
    assistant,
    content_id,
    prompt_group,
    user,
)
from tutelage.errors import DataError

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
EXAMPLES: dict[str, tuple[dict[str, Any], Any]] = {
    "text": ({"text": "words"}, Text("words")),
    "messages": ({"messages": CHAT}, Conversation(tuple(CHAT))),
    "prompt_completion": ({"prompt": "q", "completion": "a"}, PromptCompletion(user("q"), assistant("a"))),
    "preference": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 2},
        Preference(user("q"), assistant("a"), assistant("b"), 2.0),
    ),
    "implicit_preference": (
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        Preference(user("q"), assistant("a"), assistant("b")),
    ),
    "unpaired": (
        {"prompt": "q", "completion": "a", "label": False},
        Unpaired(user("q"), assistant("a"), False),
    ),
    "stepwise": (
        {"prompt": "q", "completions": ["a", "b"], "labels": [True, 0.5]},
        Stepwise(user("q"), ("a", "b"), (1.0, 0.5)),
    ),
    "prompt_only": ({"prompt": "q", "answer": 4}, PromptOnly(user("q"), 4)),
}


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_is_recognised_and_parsed(name: str) -> None:
    row, typed = EXAMPLES[name]
    assert detect([row, row]) == name
    assert parse_rows([row]).rows == [typed]


def test_the_last_row_of_another_format_is_found() -> None:
    rows = [EXAMPLES["prompt_completion"][0]] * 99 + [EXAMPLES["text"][0]]
    with pytest.raises(DataError, match=r"99 of prompt_completion \(rows 1, 2, 3, 4, 5, ...\); 1 of text \(row 100\)"):
        detect(rows)


def test_a_null_value_counts_as_absent() -> None:
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": None}]
    with pytest.raises(DataError, match=r"1 of prompt_completion \(row 1\); 1 of prompt_only \(row 2\)"):
        detect(rows)
    with pytest.raises(DataError, match=r"row 2 of f has no 'completion'; it has prompt"):
        parse_rows(rows, "prompt_completion", "f")


def test_missing_column_names_row_columns_and_the_closest() -> None:
    with pytest.raises(DataError, match=r"row 2 of f fits no format: it has promt, compl.*promt: Did you mean prompt"):
        detect([{"text": "a"}, {"promt": "q", "compl": "a"}], "f")


def test_question_and_answer_columns_are_to_be_mapped() -> None:
    with pytest.raises(DataError) as caught:
        detect([{"question": "1 + 1?", "answer": "2"}])
    assert "data.columns={question: prompt, answer: truth}" in caught.value.fix


def test_unknown_format_name() -> None:
    with pytest.raises(DataError, match="Did you mean preference"):
        parse_rows([{"text": "a"}], "preferences")


def test_human_inside_an_answer_does_not_begin_a_turn() -> None:
    text = "\n\nHuman: a\n\nAssistant: Human:  b Human: c\nAssistant: d\n\nHuman: e\n\nAssistant:  f\n\ng "
    assert parse_dialogue(text) == (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Human:  b Human: c\nAssistant: d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": " f\n\ng "},
    )


def test_two_answers_in_a_row_stay_two_turns() -> None:
    turns = parse_dialogue("\n\nHuman: a\n\nAssistant: b\n\nAssistant: c")
    assert [turn["role"] for turn in turns] == ["user", "assistant", "assistant"]


@pytest.mark.parametrize("text", ["words", "\n\nHuman: a", "x\n\nHuman: a\n\nAssistant: b", ""])
def test_what_is_not_a_dialogue(text: str) -> None:
    with pytest.raises(DataError, match="not a dialogue that ends with an answer"):
        parse_dialogue(text)


def test_diverging_prompts_are_kept_out_and_numbered() -> None:
    good = EXAMPLES["implicit_preference"][0]
    other = {"chosen": good["chosen"], "rejected": "\n\nHuman: another\n\nAssistant: b"}
    swallowed = {
        "chosen": "\n\nHuman: q\n\nAssistant: a Human: r\n\nAssistant: c",
        "rejected": "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: d",
    }
    parsed = parse_rows([good, other, good, swallowed])
    assert (parsed.numbers, parsed.diverging, len(parsed.rows)) == ([1, 3], [2, 4], 2)


def test_pairs_of_messages_share_the_longest_beginning() -> None:
    tool = {"role": "tool", "content": "t"}
    a, b = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
    q = {"role": "user", "content": "q"}
    row = {"chosen": [q, a, q, a, tool, b], "rejected": [q, a, q, b]}
    assert parse_rows([row]).rows == [Preference((q, a, q), (a, tool, b), (b,))]
    other_question = {"chosen": [q, a, q, a], "rejected": [q, b, q, a]}
    assert parse_rows([other_question]).diverging == [1]
    same = {"chosen": [q, a], "rejected": [q, a]}
    assert parse_rows([same]).rows == [Preference((q,), (a,), (a,))]


def test_whole_dialogues_beside_their_prompt() -> None:
    row = {"prompt": "q", "chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "b"}]}
    row |= {"score_chosen": 8.5, "score_rejected": 6.0}
    assert parse_rows([row]).rows == [Preference(user("q"), assistant("a"), assistant("b"), 2.5)]
    assert parse_rows([{**row, "prompt": "another"}]).diverging == [1]


def test_dialogue_text_as_prompt() -> None:
    row = {"prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", "chosen": "x", "rejected": "y"}
    (typed,) = parse_rows([row]).rows
    assert isinstance(typed, Preference)
    assert [turn["content"] for turn in typed.prompt] == ["a", "b", "c"]


@pytest.mark.parametrize(("label", "value"), [("1", True), ("False", False), (0, False), (True, True)])
def test_labels(label: Any, value: bool) -> None:
    (typed,) = parse_rows([{"prompt": "q", "completion": "a", "label": label}]).rows
    assert typed == Unpaired(user("q"), assistant("a"), value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "completion": "a", "label": "good"}, "row 1 of the data: label is 'good'"),
        ({"prompt": "q", "completion": 3}, "completion is int 3"),
        ({"messages": "hi"}, "messages is str 'hi', not a list"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has role; role is 'user' and content is None"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "has tool_calls"),
        ({"text": 1}, "text is int 1, not a string"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "nan"}, "margin is 'nan'"),
        ({"prompt": "q", "answer": "1", "solution": "one"}, "several columns .* answer, solution"),
    ],
)
def test_wrong_values_name_the_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_rows([row])


def test_speakers_of_the_from_value_form() -> None:
    row = {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    assert parse_rows([row]).rows == [Conversation(tuple(CHAT))]


def test_conversions() -> None:
    pair = Preference(user("q"), assistant("a"), assistant("b"))
    assert convert(pair, "prompt_completion") == (PromptCompletion(user("q"), assistant("a")),)
    assert convert(pair, "prompt_only") == (PromptOnly(user("q")),)
    assert convert(pair, "unpaired") == (
        Unpaired(user("q"), assistant("a"), True),
        Unpaired(user("q"), assistant("b"), False),
    )
    chat = Conversation((*user("q"), *assistant("a"), *user("r"), *assistant("b")))
    assert convert(chat, "prompt_completion") == (PromptCompletion(chat.messages[:3], assistant("b")),)
    assert convert(chat, "prompt_only") == (PromptOnly(chat.messages[:3]),)
    assert convert(Conversation(user("q")), "prompt_only") == (PromptOnly(user("q")),)
    assert convert(Unpaired(user("q"), assistant("a"), False), "prompt_completion") == ()
    assert convert(pair, "implicit_preference") == (pair,)
    with pytest.raises(DataError, match="prompt_only cannot become preference; they can become prompt_only"):
        convert(PromptOnly(user("q")), "preference")
    assert set(conversions("implicit_preference")) == {
        "preference",
        "messages",
        "prompt_completion",
        "prompt_only",
        "unpaired",
    }


def test_ids_and_groups() -> None:
    assert content_id(user("q"), None) == content_id(user("q"), None) != content_id(user("q"), "truth")
    long, longer = (*user("q"), *assistant("a"), *user("r")), (*user("q"), *assistant("b"), *user("s"))
    assert prompt_group(long) == prompt_group(longer) == prompt_group(user("q"))
    assert prompt_group(long, whole=True) != prompt_group(longer, whole=True)
    assert prompt_group(user("q")) != prompt_group(user("q2"))
