"""Row formats: how they are recognised, over every row, and parsed into typed rows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tutelage.data.rows import (
    Conversation,
    Messages,
    Preference,
    PromptCompletion,
    PromptOnly,
    Stepwise,
    Text,
    TypedRow,
    Unpaired,
    assistant,
    conversions,
    convert,
    user,
)
from tutelage.errors import DataError, closest

__all__ = ["FORMATS", "Format", "Parsed", "convert", "conversions", "detect", "parse_dialogue", "parse_rows"]


@dataclass(frozen=True)
class Format:
    """A row format: the columns that make it, those it may have besides, and what it is."""

    name: str
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    meaning: str


# In the order in which a row is tried: the first format whose columns it has is its format.
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            "preference",
            ("prompt", "chosen", "rejected"),
            ("margin", "score_chosen", "score_rejected"),
            "a prompt and two answers, strings or messages",
        ),
        Format(
            "implicit_preference",
            ("chosen", "rejected"),
            ("margin", "score_chosen", "score_rejected"),
            "two dialogues that share all but the last answer: '\\n\\nHuman: ...\\n\\nAssistant: ...' or messages",
        ),
        Format("unpaired", ("prompt", "completion", "label"), (), "an answer and whether it is desirable"),
        Format(
            "stepwise",
            ("prompt", "completions", "labels"),
            (),
            "an answer as a list of steps, and a label (true, false or a number) for each",
        ),
        Format("prompt_completion", ("prompt", "completion"), (), "a prompt and its answer, strings or messages"),
        Format("messages", ("messages",), (), "a chat: a list of {role, content}"),
        Format(
            "prompt_only",
            ("prompt",),
            ("truth", "ground_truth", "answer", "solution", "environment"),
            "a prompt, maybe with its truth and the name of its environment",
        ),
        Format("text", ("text",), (), "plain text"),
    )
}
_TRUTHS = ("truth", "ground_truth", "answer", "solution")
_KNOWN = tuple(dict.fromkeys(name for f in FORMATS.values() for name in (*f.columns, *f.optional)))
_FOREIGN = {
    "question": ("{question: prompt, answer: truth}", "{question: prompt, answer: completion} to train on the answers"),
    "instruction": ("{instruction: prompt, output: completion}",),
    "conversations": ("{conversations: messages}",),
}


def _classify(row: Mapping[str, Any]) -> str | None:
    filled = {name for name, value in row.items() if value is not None}
    return next((f.name for f in FORMATS.values() if filled.issuperset(f.columns)), None)


def missing_columns(columns: Sequence[str], wanted: Sequence[str]) -> str:
    """`It has the columns a, b; preference lacks rejected (is it rejcted?)`, for each of the formats `wanted`."""
    told = []
    for name in wanted:
        lacking = [column for column in FORMATS[name].columns if column not in columns]
        spare = [column for column in columns if column not in _KNOWN]
        near = {column: difflib.get_close_matches(column, spare, n=1) for column in lacking}
        told.append(f"{name} lacks " + ", ".join(c + (f" (is it {near[c][0]}?)" if near[c] else "") for c in lacking))
    return f"It has the columns {', '.join(columns)}; {'; '.join(told)}"


def _example_rows(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    return f"row{'s' if len(numbers) > 1 else ''} {shown}{', ...' if len(numbers) > 5 else ''}"


def detect(rows: Sequence[Mapping[str, Any]], source: str = "the data") -> str:
    """The format of the rows, decided by every one of them (a null value counts as an absent column).

    Raises DataError when a row fits no format (its number, columns, what was wanted) or when formats are mixed (counts
    and first row numbers per format).
    """
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        name = _classify(row)
        if name is None:
            raise _unrecognised(row, number, source, found)
        found.setdefault(name, []).append(number)
    if len(found) > 1:
        told = "; ".join(f"{len(at)} of {name} ({_example_rows(at)})" for name, at in found.items())
        raise DataError(
            f"{source} mixes formats: {told}",
            fix="split the file by format, fill the missing values, or set data.format to read every row as one format",
        )
    if not found:
        raise DataError(f"{source} holds no rows", fix="give at least one row")
    return next(iter(found))


def _unrecognised(row: Mapping[str, Any], number: int, source: str, found: Mapping[str, list[int]]) -> DataError:
    present = [name for name, value in row.items() if value is not None]
    hints = [
        f"{name}:{hint}"
        for name in present
        if name not in _KNOWN and name not in _FOREIGN and (hint := closest(name, _KNOWN))
    ]
    before = f" The rows before it are {', '.join(found)}." if found else ""
    wanted = "; ".join(f"{f.name}: {', '.join(f.columns)}" for f in FORMATS.values())
    foreign = [mapping for name in present for mapping in _FOREIGN.get(name, ())]
    fix = "rename columns with data.columns={name in the file: name wanted}"
    if foreign:
        fix += f", here for example data.columns={' or '.join(foreign)}"
    return DataError(
        f"row {number} of {source} fits no format: it has {', '.join(present) or 'no filled column'}.{before} "
        f"Wanted is one of: {wanted}.{' ' if hints else ''}{'; '.join(hints)}",
        fix=fix,
    )


@dataclass
class Parsed:
    """Typed rows with the row number of each, and the numbers of pairs whose prompts diverge, which are kept out."""

    format: str
    rows: list[TypedRow] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    diverging: list[int] = field(default_factory=list)


class _DivergingError(Exception):
    """The two answers of a pair do not continue the same prompt."""


def parse_rows(rows: Sequence[Mapping[str, Any]], format_name: str = "auto", source: str = "the data") -> Parsed:
    """Every row as a typed row of one format (`auto`: as `detect` finds).

    Raises DataError, naming the row, for a missing column or a value of the wrong kind.
    """
    name = detect(rows, source) if format_name == "auto" else format_name
    if name not in FORMATS:
        raise DataError(
            f"{name!r} is not a format.{closest(name, FORMATS)}", fix=f"use auto or one of {', '.join(FORMATS)}"
        )
    parsed = Parsed(name)
    for number, row in enumerate(rows, 1):
        try:
            typed = _parse(row, FORMATS[name], f"row {number} of {source}")
        except _DivergingError:
            parsed.diverging.append(number)
            continue
        parsed.rows.append(typed)
        parsed.numbers.append(number)
    return parsed


def _parse(row: Mapping[str, Any], form: Format, where: str) -> TypedRow:
    for column in form.columns:
        if row.get(column) is None:
            present = [name for name, value in row.items() if value is not None]
            raise DataError(
                f"{where} has no {column!r}; it has {', '.join(present) or 'no filled column'}, and the format "
                f"{form.name} wants {', '.join(form.columns)}.{closest(column, present)}",
                fix="rename columns with data.columns={name in the file: name wanted}",
            )
    match form.name:
        case "text":
            return Text(_string(row["text"], "text", where))
        case "messages":
            return Conversation(_messages(row["messages"], "messages", where))
        case "prompt_only":
            return PromptOnly(_prompt(row["prompt"], where), _truth(row, where), _environment(row, where))
        case "prompt_completion":
            return PromptCompletion(_prompt(row["prompt"], where), _answer(row["completion"], "completion", where))
        case "unpaired":
            answer = _answer(row["completion"], "completion", where)
            return Unpaired(_prompt(row["prompt"], where), answer, _label(row["label"], where))
        case "stepwise":
            return _stepwise(row, where)
        case "preference":
            return _preference(row, where)
        case _:
            return _implicit_preference(row["chosen"], row["rejected"], _margin(row, where), where)


def _stepwise(row: Mapping[str, Any], where: str) -> Stepwise:
    steps, labels = (_list(row[name], name, where) for name in ("completions", "labels"))
    if len(steps) != len(labels):
        raise DataError(
            f"{where} has {len(steps)} completions (steps) and {len(labels)} labels", fix="give each step its label"
        )
    texts = tuple(_string(step, f"completions[{index}]", where) for index, step in enumerate(steps))
    return Stepwise(_prompt(row["prompt"], where), texts, tuple(_number(x, "a label", where) for x in labels))


def _list(value: Any, column: str, where: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(
            f"{where}: {column} is {type(value).__name__} {value!r:.60}, not a list with an entry for each step",
            fix="give prompt, completions: [step, ...] and labels: [true, ...]",
        )
    return value


def _preference(row: Mapping[str, Any], where: str) -> Preference:
    prompt, margin = _prompt(row["prompt"], where), _margin(row, where)
    chosen, rejected = (_answer(row[name], name, where) for name in ("chosen", "rejected"))
    if chosen[:1] and chosen[0]["role"] != "assistant":  # whole dialogues beside the prompt they repeat
        pair = _implicit_preference(row["chosen"], row["rejected"], margin, where)
        contents = [turn["content"] for turn in pair.prompt if turn["role"] != "system"]
        if [turn["content"] for turn in prompt if turn["role"] != "system"] not in (contents, contents[:1]):
            raise _DivergingError
        return pair
    if rejected[:1] and rejected[0]["role"] != "assistant":
        raise _DivergingError
    return Preference(prompt, chosen, rejected, margin)


def _implicit_preference(chosen: Any, rejected: Any, margin: float, where: str) -> Preference:
    """As text, dialogues share all turns but the last; as messages, a prompt, and answer and tool turns follow it."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        a, b = parse_dialogue(chosen, where), parse_dialogue(rejected, where)
        if a[:-1] != b[:-1]:
            raise _DivergingError
        return Preference(a[:-1], a[-1:], b[-1:], margin)
    a, b = _messages(chosen, "chosen", where), _messages(rejected, "rejected", where)
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    if shared == len(a) or shared == len(b):  # equal, or one a beginning of the other: the last turns are the answers
        shared = min(len(a), len(b)) - 1
    tails = (a[shared:], b[shared:])
    if any(tail[0]["role"] != "assistant" or any(t["role"] in ("user", "system") for t in tail) for tail in tails):
        raise _DivergingError
    return Preference(a[:shared], *tails, margin)


_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def parse_dialogue(text: str, where: str = "the text") -> Messages:
    """`"\\n\\nHuman: a\\n\\nAssistant: b"` -> messages, ending with an assistant turn.

    Only a name at the start of a paragraph begins a turn: "Human:" inside an answer stays there, as in the real data.
    One space after the colon belongs to the marker; all other white space is the content's.  Consecutive turns of one
    speaker stay apart.  Raises DataError when the text does not begin with a turn or does not end with an answer.
    """
    pieces = _TURN.split(text)
    if pieces[0].strip() or len(pieces) < 3 or pieces[-2] != "Assistant":
        raise DataError(
            f"{where} is not a dialogue that ends with an answer: it begins with {text[:40]!r} and its last turn is "
            f"{pieces[-2] if len(pieces) > 1 else 'missing'}",
            fix="write '\\n\\nHuman: ...\\n\\nAssistant: ...', give messages, or add a prompt column",
        )
    names, contents = pieces[1::2], pieces[2::2]
    return tuple(
        {"role": _SPEAKERS[name], "content": content.removeprefix(" ")}
        for name, content in zip(names, contents, strict=True)
    )


def _string(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {column} is {type(value).__name__} {value!r:.60}, not a string", fix="give a string")
    return value


_SHAREGPT = {"human": "user", "gpt": "assistant"}


def _messages(value: Any, column: str, where: str) -> Messages:
    """A list of {role, content}; {from, value} with the speakers human and gpt is read alike."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(
            f"{where}: {column} is {type(value).__name__} {value!r:.60}, not a list of messages",
            fix="a message is {'role': 'user', 'content': '...'}",
        )
    turns = []
    for index, turn in enumerate(value):
        at = f"{where}: {column}[{index}]"
        if not isinstance(turn, Mapping):
            raise DataError(f"{at} is {type(turn).__name__}", fix="a message is {'role': 'user', 'content': '...'}")
        if turn.get("tool_calls"):
            raise DataError(f"{at} has tool_calls, which are not rendered", fix="write the call into its content")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                f"{at} has {', '.join(turn)}; role is {role!r:.40} and content is {content!r:.40}",
                fix="role and content are strings",
            )
        turns.append({"role": _SHAREGPT.get(role, role), "content": content})
    return tuple(turns)


def _prompt(value: Any, where: str) -> Messages:
    if not isinstance(value, str):
        return _messages(value, "prompt", where)
    if value.startswith("\n\nHuman:"):
        opened = value.rstrip()
        return parse_dialogue(opened.removesuffix("\n\nAssistant:") + "\n\nAssistant:", where)[:-1]
    return user(value)


def _answer(value: Any, column: str, where: str) -> Messages:
    return assistant(value) if isinstance(value, str) else _messages(value, column, where)


_LABELS = {"true": True, "1": True, "false": False, "0": False}


def _label(value: Any, where: str) -> bool:
    label = _LABELS.get(str(value).strip().lower())
    if label is None:
        raise DataError(f"{where}: label is {value!r}", fix="label is true or false (or 1 or 0)")
    return label


def _number(value: Any, column: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if number - number != 0:
        raise DataError(f"{where}: {column} is {value!r}", fix=f"{column} is a finite number")
    return number


def _margin(row: Mapping[str, Any], where: str) -> float:
    if row.get("margin") is not None:
        return _number(row["margin"], "margin", where)
    if row.get("score_chosen") is not None and row.get("score_rejected") is not None:
        return _number(row["score_chosen"], "score_chosen", where) - _number(
            row["score_rejected"], "score_rejected", where
        )
    return 0.0


def _truth(row: Mapping[str, Any], where: str) -> Any:
    filled = [name for name in _TRUTHS if row.get(name) is not None]
    if len(filled) > 1 and filled[0] != "truth":
        raise DataError(
            f"{where} has several columns that may be the ground truth: {', '.join(filled)}",
            fix=f"say which: data.columns={{{filled[0]}: truth}}",
        )
    return row[filled[0]] if filled else None


def _environment(row: Mapping[str, Any], where: str) -> str | None:
    name = row.get("environment")
    return None if name is None else _string(name, "environment", where)
