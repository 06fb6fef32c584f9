"""Typed rows: what every format is parsed into, and how one kind becomes another.

A chat is a tuple of {"role", "content"} messages.  A prompt given as a string is one user turn, an answer given as a
string one assistant turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tutelage.errors import DataError

Message = dict[str, str]
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Text:
    """Plain text without turns."""

    text: str


@dataclass(frozen=True)
class Conversation:
    """A chat."""

    messages: Messages


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and the turns that answer it; the completion may hold tool turns between assistant turns."""

    prompt: Messages
    completion: Messages


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the first preferred; `margin` says by how much (0: the data does not say)."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    margin: float = 0.0


@dataclass(frozen=True)
class Unpaired:
    """An answer and whether it is desirable."""

    prompt: Messages
    completion: Messages
    label: bool


@dataclass(frozen=True)
class Stepwise:
    """An answer in steps, and how good each of them is: 1 right and 0 wrong, or any number."""

    prompt: Messages
    steps: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True)
class PromptOnly:
    """A prompt and, where the data has them, the truth that a reward rule compares with and its environment's name."""

    prompt: Messages
    truth: Any = None
    environment: str | None = None


TypedRow = Text | Conversation | PromptCompletion | Preference | Unpaired | Stepwise | PromptOnly


def user(text: str) -> Messages:
    """One user turn."""
    return ({"role": "user", "content": text},)


def assistant(text: str) -> Messages:
    """One assistant turn."""
    return ({"role": "assistant", "content": text},)


def content_id(*parts: Any) -> str:
    """16 hex digits of the SHA-256 of the parts as JSON: the same for the same content in every run."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompt_group(prompt: Messages, *, whole: bool = False) -> str:
    """What must stay on one side of a split: the turns up to the first user turn, or the whole prompt.

    Dialogues that begin alike often continue alike, so the beginning is the safer group.  It is made of roles and
    contents, not of a rendering: the same data is split alike for a policy and a reward model with other templates.
    """
    end = len(prompt)
    if not whole:
        end = next((index + 1 for index, turn in enumerate(prompt) if turn["role"] == "user"), end)
    return json.dumps([[turn["role"], turn["content"]] for turn in prompt[:end]], ensure_ascii=False)


def last_answer(messages: Messages) -> int | None:
    """Index of the last assistant turn."""
    return next((i for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "assistant"), None)


def _conversation_to_prompt_completion(row: Conversation) -> tuple[TypedRow, ...]:
    last = last_answer(row.messages)
    if last is None:
        raise DataError("a conversation without an assistant turn has no completion", fix="use it as prompt_only")
    return (PromptCompletion(row.messages[:last], row.messages[last : last + 1]),)


def _conversation_to_prompt(row: Conversation) -> tuple[TypedRow, ...]:
    ends_in_answer = bool(row.messages) and row.messages[-1]["role"] == "assistant"
    return (PromptOnly(row.messages[:-1] if ends_in_answer else row.messages),)


_CONVERSIONS: dict[tuple[type, str], Callable[[Any], tuple[TypedRow, ...]]] = {
    (Conversation, "prompt_completion"): _conversation_to_prompt_completion,
    (Conversation, "prompt_only"): _conversation_to_prompt,
    (PromptCompletion, "messages"): lambda row: (Conversation(row.prompt + row.completion),),
    (PromptCompletion, "prompt_only"): lambda row: (PromptOnly(row.prompt),),
    (Preference, "messages"): lambda row: (Conversation(row.prompt + row.chosen),),
    (Preference, "prompt_completion"): lambda row: (PromptCompletion(row.prompt, row.chosen),),
    (Preference, "prompt_only"): lambda row: (PromptOnly(row.prompt),),
    (Preference, "unpaired"): lambda row: (
        Unpaired(row.prompt, row.chosen, True),
        Unpaired(row.prompt, row.rejected, False),
    ),
    (Unpaired, "prompt_completion"): lambda row: (PromptCompletion(row.prompt, row.completion),) if row.label else (),
    (Unpaired, "messages"): lambda row: (Conversation(row.prompt + row.completion),) if row.label else (),
    (Unpaired, "prompt_only"): lambda row: (PromptOnly(row.prompt),),
    (Stepwise, "prompt_only"): lambda row: (PromptOnly(row.prompt),),
}

_FORMAT_OF: dict[type, str] = {
    Text: "text",
    Conversation: "messages",
    PromptCompletion: "prompt_completion",
    Preference: "preference",
    Unpaired: "unpaired",
    Stepwise: "stepwise",
    PromptOnly: "prompt_only",
}


def conversions(format_name: str) -> tuple[str, ...]:
    """The formats that rows of this one can become, itself first."""
    name = "preference" if format_name == "implicit_preference" else format_name
    return (name, *(target for source, target in _CONVERSIONS if _FORMAT_OF[source] == name))


def convert(row: TypedRow, target: str) -> tuple[TypedRow, ...]:
    """The row as rows of the format `target`.

    A preference becomes its chosen answer as prompt_completion or messages, its prompt as prompt_only, and two unpaired
    rows.  A conversation is cut before its last assistant turn.  An undesirable unpaired row gives no completion: ().
    Raises DataError where the conversion makes no sense, naming those that do.
    """
    if target == "implicit_preference":
        target = "preference"
    name = _FORMAT_OF[type(row)]
    if name == target:
        return (row,)
    conversion = _CONVERSIONS.get((type(row), target))
    if conversion is None:
        raise DataError(
            f"rows of the format {name} cannot become {target}; they can become {', '.join(conversions(name))}",
            fix=f"give data of the format {target}",
        )
    return conversion(row)
