"""Single answers with labels as token sequences: desirable or not, with a mismatched answer each, or labelled by step.

Shapes: B rows, N steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tutelage.config.common import DataConfig
from tutelage.data.chat import ChatTemplate
from tutelage.data.limits import Fitted, Limits
from tutelage.data.mismatch import mismatched_rows
from tutelage.data.preflight import Tally
from tutelage.data.prepare import Encode, Item, Prepared, has_text, prepare_rows
from tutelage.data.rows import Messages, Stepwise, TypedRow, Unpaired, assistant, content_id, prompt_group
from tutelage.data.steps import step_ends
from tutelage.errors import DataError
from tutelage.types import Labelled, Ragged, Sequences, StepLabels
from tutelage.types import Unpaired as UnpairedBatch

ANSWERS, STEPS = "labelled answers", "labelled steps"


def prepare_unpaired(
    cfg: DataConfig, template: ChatTemplate, seed: int, *, context: int | None = None
) -> Prepared[UnpairedBatch]:
    """Answers that are desirable or not, and to each prompt an answer that was given to another one.

    A preference row gives two answers.  Mismatched answers are those of `data.mismatch:mismatched_rows`, among the
    training rows and among the held-out rows apart; one that does not fit behind a longer prompt is cut at its end, and
    a note says how many were.
    Raises DataError as `prepare_demonstrations`, and where all rows of a side have one prompt.
    """
    tally = Tally()
    cut: list[bool] = []

    def build(items: Sequence[Item]) -> UnpairedBatch:
        answers = _labelled(items)
        partner_B = mismatched_rows([item.whole for item in items], seed)
        prompts, given = answers.sequences.prompt_rows(), answers.sequences.response_rows()
        masks = [row.tolist() for row in answers.sequences.trained.rows()]
        responses, trained = [], []
        for row, other in enumerate(partner_B.tolist()):
            room = len(given[other]) if context is None else context - len(prompts[row])
            cut.append(room < len(given[other]))
            responses.append(given[other][:room])
            trained.append(masks[other][:room])
        mismatched = Sequences.build(prompts, responses, trained)
        return UnpairedBatch(answers.sequences, mismatched, answers.desirable, answers.ids)

    prepared = prepare_rows(
        cfg, template, seed, ("unpaired",), ANSWERS, _encoder(cfg, template, tally, context), build, tally
    )
    if not any(cut):
        return prepared
    note = f"{sum(cut)} of {len(cut)} mismatched answers, which estimate the KL, are cut to the context of the model"
    return replace(prepared, preflight=replace(prepared.preflight, notes=(*prepared.preflight.notes, note)))


def prepare_labelled(
    cfg: DataConfig, template: ChatTemplate, seed: int, *, context: int | None = None
) -> Prepared[Labelled]:
    """Answers that are desirable or not, for losses without a mismatched answer.  Raises DataError likewise."""
    tally = Tally()
    encode = _encoder(cfg, template, tally, context)
    return prepare_rows(cfg, template, seed, ("unpaired",), ANSWERS, encode, _labelled, tally)


def _encoder(cfg: DataConfig, template: ChatTemplate, tally: Tally, context: int | None) -> Encode:
    limits = Limits(template, tally, cfg.too_long, cfg.max_prompt_tokens, cfg.max_response_tokens, context)

    def encode(typed: TypedRow, row: str) -> Item | None:
        assert isinstance(typed, Unpaired)
        if not has_text(typed.prompt, typed.completion, row, tally):
            return None
        encoded = template.encode_completion(typed.prompt, typed.completion)
        fitted = limits.fit(row, encoded.prompt, [(encoded.response, encoded.trained)])
        if fitted is None:
            return None
        return _item(row, typed.prompt, (typed.completion, typed.label), (fitted, typed.label))

    return encode


def _item(row: str, prompt: Messages, content: object, value: object) -> Item:
    return Item(row, content_id(prompt, content), prompt_group(prompt), prompt_group(prompt, whole=True), value)


def _labelled(items: Sequence[Item]) -> Labelled:
    desirable = torch.tensor([item.value[1] for item in items], dtype=torch.bool)
    return Labelled(_sequences([item.value[0] for item in items]), desirable, tuple(item.id for item in items))


def _sequences(fitted: Sequence[Fitted]) -> Sequences:
    responses = [one.responses[0] for one in fitted]
    return Sequences.build(
        [one.prompt for one in fitted], [ids for ids, _ in responses], [mask for _, mask in responses]
    )


def prepare_steps(
    cfg: DataConfig,
    template: ChatTemplate,
    seed: int,
    separator: str,
    *,
    context: int | None = None,
    allowed: Callable[[float], bool] = lambda label: True,
) -> Prepared[StepLabels]:
    """Answers in steps, written one after the other with `separator` between them, and a label for each step.

    A response that is cut keeps the steps that end within it.
    allowed  labels that the loss can take.
    Raises DataError as `prepare_demonstrations`, and for a label that is not allowed.
    """
    tally = Tally()
    limits = Limits(template, tally, cfg.too_long, cfg.max_prompt_tokens, cfg.max_response_tokens, context)

    def encode(typed: TypedRow, row: str) -> Item | None:
        assert isinstance(typed, Stepwise)
        completion = assistant(separator.join(typed.steps))
        if not has_text(typed.prompt, completion, row, tally):
            return None
        encoded = template.encode_completion(typed.prompt, completion)
        ends = set(step_ends(template.tokenizer, encoded.response, separator))
        if len(ends) != len(typed.labels):
            raise DataError(
                f"its text has {len(ends)} steps between separators {separator!r}, and {len(typed.labels)} labels",
                fix="choose a reward_model.step_separator that no step contains, and drop blank steps",
            )
        marks = [at in ends for at in range(len(encoded.response))]
        fitted = limits.fit(row, encoded.prompt, [(encoded.response, marks)])
        if fitted is None:
            return None
        kept = typed.labels[: sum(fitted.responses[0][1])]
        return _item(row, typed.prompt, (typed.steps, typed.labels), (fitted, kept))

    def build(items: Sequence[Item]) -> StepLabels:
        refused = [(item, label) for item in items for label in item.value[1] if not allowed(label)]
        if refused:
            item, label = refused[0]
            raise DataError(
                f"row {item.row} has the label {label:g}, and {len(refused)} labels are like it: this loss takes 0 to "
                "1",
                fix="use reward_model.loss=step_mse for other numbers",
            )
        labels = [torch.tensor(item.value[1], dtype=torch.float32) for item in items]
        sequences = _sequences([item.value[0] for item in items])
        return StepLabels(sequences, Ragged.from_rows(labels, torch.float32), tuple(item.id for item in items))

    return prepare_rows(cfg, template, seed, ("stepwise",), STEPS, encode, build, tally)
