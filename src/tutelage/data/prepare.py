"""From a data section of a recipe to token sequences: read, recognise, render, check, split; and the preflight report.

Rows whose prompt, response or context is over length are handled as `too_long` says.  Everything taken out or cut is in
the report; `refuse` is applied before anything is returned.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from tutelage.config.common import DataConfig, PromptDataConfig
from tutelage.data.chat import ChatTemplate, Encoded, LossOn, train_on_all
from tutelage.data.formats import conversions, convert, missing_columns, parse_rows
from tutelage.data.limits import Limits
from tutelage.data.preflight import Preflight, Tally
from tutelage.data.rows import (
    Conversation,
    Messages,
    Preference,
    PromptCompletion,
    PromptOnly,
    Text,
    TypedRow,
    content_id,
    last_answer,
    prompt_group,
)
from tutelage.data.sources import read_rows
from tutelage.data.splits import split_by_group
from tutelage.errors import DataError
from tutelage.types import Demonstrations, Pairs, Prompts, Sequences

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared(Generic[T]):
    """Training rows, held-out rows (None: nothing is held out), the report, and a SHA-256 of the rows read.

    groups, eval_groups  what may not be torn apart (`rows.prompt_group`), one per row; for folds.
    """

    train: T
    eval: T | None
    preflight: Preflight
    fingerprint: str
    groups: list[str]
    eval_groups: list[str]


@dataclass(frozen=True)
class Item:
    """A usable row: what it is made of, and what keeps it apart from others."""

    row: str
    id: str
    group: str
    whole: str
    value: Any


Encode = Callable[[TypedRow, str], Item | None]


def prepare_demonstrations(
    cfg: DataConfig, template: ChatTemplate, loss_on: LossOn, seed: int, *, context: int | None = None
) -> Prepared[Demonstrations]:
    """Supervised sequences from text, messages, prompt/completion, preferences (chosen) or unpaired (desirable) rows.

    loss_on   see `ChatTemplate`; a row that names its prompt is never trained on it, unless loss_on is "all".
              Plain text is trained on every token but the first.
    context   positions of the model; a longer prompt + response is over length.
    Raises DataError as `read_rows`, `parse_rows` and `Preflight.refuse` do.
    """
    tally = Tally()
    limits = Limits(template, tally, cfg.too_long, cfg.max_prompt_tokens, cfg.max_response_tokens, context)

    def encode(typed: TypedRow, row: str) -> Item | None:
        if isinstance(typed, Text):
            return _text_item(typed, row, template, tally, limits)
        prompt, completion = _turns(typed, loss_on, row, tally)
        if not completion or not has_text(prompt, completion, row, tally):
            return None
        encoded = template.encode_completion(
            prompt, completion, "completion" if loss_on == "completion" else "assistant"
        )
        fitted = limits.fit(row, encoded.prompt, [(encoded.response, encoded.trained)])
        if fitted is None:
            return None
        cut = Encoded(fitted.prompt, *fitted.responses[0])
        if loss_on == "all":
            cut = train_on_all(cut.prompt, cut.response)
        return Item(row, content_id(prompt, completion), prompt_group(prompt), prompt_group(prompt, whole=True), cut)

    def build(items: Sequence[Item]) -> Demonstrations:
        parts: list[Encoded] = [item.value for item in items]
        sequences = Sequences.build([p.prompt for p in parts], [p.response for p in parts], [p.trained for p in parts])
        return Demonstrations(sequences, tuple(item.id for item in items))

    targets = ("text", "prompt_completion", "messages")
    return prepare_rows(cfg, template, seed, targets, "demonstrations", encode, build, tally)


def prepare_pairs(cfg: DataConfig, template: ChatTemplate, seed: int, *, context: int | None = None) -> Prepared[Pairs]:
    """Preference pairs; the two answers of a pair keep one prompt, also where it is cut.

    Raises DataError as `prepare_demonstrations`.
    """
    tally = Tally()
    limits = Limits(template, tally, cfg.too_long, cfg.max_prompt_tokens, cfg.max_response_tokens, context)

    def encode(typed: TypedRow, row: str) -> Item | None:
        assert isinstance(typed, Preference)
        if not has_text(typed.prompt, typed.chosen, row, tally) or not has_text((), typed.rejected, row, tally):
            return None
        chosen = template.encode_completion(typed.prompt, typed.chosen)
        rejected = template.encode_completion(typed.prompt, typed.rejected)
        fitted = limits.fit(
            row, chosen.prompt, [(chosen.response, chosen.trained), (rejected.response, rejected.trained)]
        )
        if fitted is None:
            return None
        if fitted.responses[0][0] == fitted.responses[1][0]:
            tally.add("identical_pair", row, "dropped")
            return None
        name = content_id(typed.prompt, typed.chosen, typed.rejected)
        whole = prompt_group(typed.prompt, whole=True)
        return Item(row, name, prompt_group(typed.prompt), whole, (fitted, typed.margin))

    def build(items: Sequence[Item]) -> Pairs:
        sides = []
        for side in (0, 1):
            responses = [item.value[0].responses[side] for item in items]
            prompts = [item.value[0].prompt for item in items]
            sides.append(Sequences.build(prompts, [ids for ids, _ in responses], [mask for _, mask in responses]))
        margin = torch.tensor([item.value[1] for item in items], dtype=torch.float32)
        return Pairs(sides[0], sides[1], margin, tuple(item.id for item in items))

    return prepare_rows(cfg, template, seed, ("preference",), "pairs", encode, build, tally)


def prepare_prompts(
    cfg: PromptDataConfig,
    template: ChatTemplate,
    seed: int,
    *,
    context: int | None = None,
    max_new_tokens: int = 0,
) -> Prepared[Prompts]:
    """Prompts (and ground truths) of rows of any format that has prompts; equal prompts with equal truths count once.

    context         positions of the model, of which `max_new_tokens` are kept free for the response.
    Prompts.ids     hashes of the messages, the truth and the environment: the same in every run and for every template.
    Prompts.environments  "" for a row that names none; None where no row does.
    Raises DataError as `prepare_demonstrations`.
    """
    tally = Tally()
    room = None if context is None else context - max_new_tokens
    if room is not None and room < 1:
        raise DataError(
            f"rollout.max_new_tokens={max_new_tokens} leaves no room for a prompt in a context of {context} positions",
            fix="lower rollout.max_new_tokens",
        )
    limits = Limits(template, tally, cfg.too_long, cfg.max_prompt_tokens, None, room)

    def encode(typed: TypedRow, row: str) -> Item | None:
        assert isinstance(typed, PromptOnly)
        if not any(turn["content"].strip() for turn in typed.prompt):
            tally.add("empty_prompt", row, "dropped")
            return None
        fitted = limits.fit(row, template.encode_prompt(typed.prompt), [])
        if fitted is None:
            return None
        world = typed.environment
        name = content_id(typed.prompt, typed.truth, *([] if world is None else [world]))
        value = (tuple(fitted.prompt), typed.truth, typed.prompt, world)
        return Item(row, name, prompt_group(typed.prompt), prompt_group(typed.prompt, whole=True), value)

    def build(items: Sequence[Item]) -> Prompts:
        worlds = tuple(item.value[3] or "" for item in items)
        return Prompts(
            tokens=tuple(item.value[0] for item in items),
            ids=tuple(item.id for item in items),
            truths=tuple(item.value[1] for item in items),
            messages=tuple(item.value[2] for item in items),
            environments=worlds if any(worlds) else None,
        )

    return prepare_rows(cfg, template, seed, ("prompt_only",), "prompts", encode, build, tally)


def _text_item(typed: Text, row: str, template: ChatTemplate, tally: Tally, limits: Limits) -> Item | None:
    if not typed.text.strip():
        tally.add("empty_response", row, "dropped")
        return None
    encoded = template.encode_text(typed.text)
    fitted = limits.fit(row, encoded.prompt, [(encoded.response, encoded.trained)])
    if fitted is None:
        return None
    cut = Encoded(fitted.prompt, *fitted.responses[0])
    return Item(row, content_id(typed.text), typed.text, typed.text, cut)


def _turns(typed: TypedRow, loss_on: LossOn, row: str, tally: Tally) -> tuple[Messages, Messages]:
    """The prompt and the answering turns; no answering turns when the row has none."""
    if isinstance(typed, PromptCompletion):
        return typed.prompt, typed.completion
    assert isinstance(typed, Conversation)
    last = last_answer(typed.messages)
    if last is None:
        tally.add("no_answer", row, "dropped")
        return typed.messages, ()
    if last + 1 < len(typed.messages):
        tally.add("trailing_turns", row, "truncated")
    first = next(index for index, turn in enumerate(typed.messages) if turn["role"] == "assistant")
    start = last if loss_on == "completion" else first
    return typed.messages[:start], typed.messages[start : last + 1]


def has_text(prompt: Messages, completion: Messages, row: str, tally: Tally) -> bool:
    """Whether prompt and answer hold more than white space; turns after the last answer are counted."""
    if prompt and not any(turn["content"].strip() for turn in prompt):
        tally.add("empty_prompt", row, "dropped")
        return False
    if not any(turn["content"].strip() for turn in completion if turn["role"] == "assistant"):
        tally.add("empty_response", row, "dropped")
        return False
    if completion[-1]["role"] != "assistant":
        tally.add("trailing_turns", row, "truncated")
    return True


def prepare_rows(
    cfg: PromptDataConfig,
    template: ChatTemplate,
    seed: int,
    targets: Sequence[str],
    kind: str,
    encode: Encode,
    build: Callable[[Sequence[Item]], T],
    tally: Tally,
) -> Prepared[T]:
    sources = [(cfg.train, ""), *([(cfg.eval, "eval:")] if cfg.eval is not None else [])]
    read = [_read(cfg, source, label, template, targets, kind, encode, tally) for source, label in sources]
    train = read[0].items
    if cfg.eval is not None:
        held = read[1].items
        known = {item.whole for item in held}
        for item in train:
            if item.whole in known:
                tally.add("train_eval_overlap", item.row, "dropped")
        train = [item for item in train if item.whole not in known]
    elif cfg.eval_fraction > 0 and train:
        groups = _groups(train)
        kept, out = split_by_group(groups, cfg.eval_fraction, seed)
        train, held = [train[i] for i in kept.tolist()], [train[i] for i in out.tolist()]
    else:
        held = []
    notes = dict.fromkeys(note for part in read for note in part.notes)
    report = tally.report(
        source=" and ".join(source for source, _ in sources),
        format_name=" and ".join(dict.fromkeys(part.format for part in read)),
        rows=sum(part.count for part in read),
        train_rows=len(train),
        eval_rows=len(held),
        kind=kind if kind in ("pairs", "prompts") else "demonstrations",
        notes=notes,
    )
    if cfg.too_long == "error" and (over := tally.over_length()):
        raise DataError(
            "; ".join(finding.line() for finding in over) + "\n" + "\n".join(report.lines()),
            fix="raise the length limits, or set data.too_long to drop or truncate",
        )
    report.refuse(cfg.max_bad_fraction)
    if cfg.eval is not None and not held:
        raise DataError(f"no row of {cfg.eval} can be used\n" + "\n".join(report.lines()), fix="repair the eval data")
    digest = hashlib.sha256("".join(part.fingerprint for part in read).encode()).hexdigest()
    eval_groups = _groups(held)
    batch = _built(build, train, f"training rows of {cfg.train}")
    held_out = _built(build, held, f"held-out rows of {cfg.eval or cfg.train}") if held else None
    return Prepared(batch, held_out, report, digest, _groups(train), eval_groups)


def _built(build: Callable[[Sequence[Item]], T], items: Sequence[Item], rows: str) -> T:
    """What `build` makes of them; an error of its own says of which rows it speaks."""
    try:
        return build(items)
    except DataError as error:
        raise DataError(f"{rows}: {error.what}", fix=error.fix) from error


def _groups(items: Sequence[Item]) -> list[str]:
    """The first turns of each prompt; the whole prompts when all of them begin alike."""
    groups = [item.group for item in items]
    return groups if len(set(groups)) > 1 else [item.whole for item in items]


@dataclass(frozen=True)
class _Read:
    items: list[Item]
    format: str
    count: int
    fingerprint: str
    notes: list[str]


def _read(
    cfg: PromptDataConfig,
    source: str,
    label: str,
    template: ChatTemplate,
    targets: Sequence[str],
    kind: str,
    encode: Encode,
    tally: Tally,
) -> _Read:
    table = read_rows(source, columns=cfg.columns, limit=cfg.limit)
    parsed = parse_rows(table.rows, cfg.format, source)
    possible = conversions(parsed.format)
    target = possible[0] if possible[0] in targets else next((name for name in targets if name in possible), None)
    if target is None:
        columns = list(dict.fromkeys(name for row in table.rows for name in row))
        raise DataError(
            f"{source} has rows of the format {parsed.format}, which cannot become {kind}; "
            f"wanted is {' or '.join(targets)}. {missing_columns(columns, targets)}",
            fix="give other data, or rename its columns with data.columns={name in the file: name wanted}",
        )
    for number in parsed.diverging:
        tally.add("diverging_prompts", f"{label}{number}", "dropped")
    items: list[Item] = []
    seen: set[str] = set()
    special = re.compile("|".join(map(re.escape, template.special_texts())) or r"(?!)")
    for typed, number in zip(parsed.rows, parsed.numbers, strict=True):
        row = f"{label}{number}"
        made = convert(typed, target)
        if not made:
            tally.add("undesirable", row, "dropped")
        for one in made:
            item = _try(encode, one, row, tally)
            if item is None:
                continue
            if special.search(_all_text(one)):
                tally.add("special_token_text", row, "kept")
            if item.id in seen:
                tally.add("duplicate", row, "dropped" if kind == "prompts" else "kept")
                if kind == "prompts":
                    continue
            seen.add(item.id)
            items.append(item)
    return _Read(items, parsed.format, len(table.rows), table.fingerprint, _notes(parsed.format, template, parsed.rows))


def _try(encode: Encode, typed: TypedRow, row: str, tally: Tally) -> Item | None:
    """The item, or None with the row counted where the template refuses its messages."""
    try:
        return encode(typed, row)
    except DataError as error:
        tally.add("template_refused", row, "dropped", error.what)
        return None


def _all_text(typed: TypedRow) -> str:
    if isinstance(typed, Text):
        return typed.text
    parts = [getattr(typed, name, ()) for name in ("messages", "prompt", "completion", "chosen", "rejected")]
    return "\n".join([*(turn["content"] for part in parts for turn in part), *getattr(typed, "steps", ())])


def _notes(format_name: str, template: ChatTemplate, rows: Sequence[TypedRow]) -> list[str]:
    if template.name != "plain" or format_name == "text":
        return []
    chats = sum(sum(t["role"] == "user" for t in getattr(r, "prompt", getattr(r, "messages", ()))) > 1 for r in rows)
    if not chats:
        return []
    return [
        f"{chats} rows are chats of several turns, which the plain template writes without speakers; "
        "set model.chat_template to chatml, hh or a Jinja file"
    ]
