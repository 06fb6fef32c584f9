"""From messages to tokens, once: a chat template applied turn by turn, so that every boundary is a token boundary.

A rendered chat is cut at the two ends of every assistant turn and each piece is tokenised alone.  So the ids of a
prompt are the ids that training sees before the response, and prompt ids + sampled ids are training ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from tutelage.data.rows import Message, Messages
from tutelage.data.special import SpecialIds, added_ids, segment_anchor, special_ids
from tutelage.data.templates import resolve_template
from tutelage.errors import ConfigError, DataError, ModelError

__all__ = ["ChatTemplate", "Encoded", "LossOn", "SpecialIds", "special_ids"]

LossOn = Literal["assistant", "completion", "all"]
_PROBE = ({"role": "user", "content": "A question."},)
_MARK = "\ue000{}\ue001"
_ANSWER = _MARK.format("answer")


class Encoded(NamedTuple):
    """prompt and response token ids, and which response tokens are trained (False: a hole)."""

    prompt: list[int]
    response: list[int]
    trained: list[bool]


class ChatTemplate:
    """A tokenizer and a chat template.

    template  a built-in name (chatml, plain, hh), a Jinja file, or None: the tokenizer's own, else plain.
    special   `special_ids(tokenizer, generation_config, ...)`; by default the tokenizer's own EOS.

    eos_ids          every id that ends a response; holds the id that ends a turn in this template.  Empty for encoders.
    end_id           the id appended to a response.  An encoder's is its closing token ([SEP]): `end_is_structural`.
    response_prefix  text between the generation prompt and the answer (hh: one space); a part of the response.
    trims            the template strips white space around answers; so do the encoders here.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, *, special: SpecialIds | None = None) -> None:
        self.tokenizer = tokenizer
        self.name, self._source, built_in = resolve_template(tokenizer, template)
        self._prefix_ids, suffix_ids = added_ids(tokenizer)
        self._adds_prefix = built_in or bool(suffix_ids)
        self._anchor = segment_anchor(tokenizer)
        if special is None and not (suffix_ids and tokenizer.eos_token_id is None):
            special = special_ids(tokenizer)
        self.eos_ids: tuple[int, ...] = special.eos_ids if special else ()
        self.end_is_structural = not self.eos_ids
        self.end_id: int = self.eos_ids[0] if self.eos_ids else suffix_ids[-1]
        self._cached_ids = lru_cache(maxsize=4096)(self._tokenise)
        self._cached_prompt_pieces = lru_cache(maxsize=16)(self._opening)
        self._bindings = self._built_in_bindings() if built_in else {}
        self._read_turn_shape()

    def _built_in_bindings(self) -> dict[str, str]:
        """Values of the names that the built-in templates use."""
        tokenizer = self.tokenizer
        im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        has_im_end = im_end is not None and im_end != tokenizer.unk_token_id
        start = tokenizer.decode(self._prefix_ids) if self._prefix_ids else ""
        return {"text_start": start, "turn_end": "<|im_end|>" if has_im_end else self._token_text(self.end_id)}

    def _token_text(self, index: int) -> str:
        return str(self.tokenizer.decode([index], skip_special_tokens=False))

    def _read_turn_shape(self) -> None:
        """How this template writes an answer: what stands before and after it, and whether it is stripped."""
        opened, whole = self.render(_PROBE, add_generation_prompt=True), self._render_answer(_ANSWER)
        if not whole.startswith(opened) or _ANSWER not in whole[len(opened) :]:
            raise ModelError(
                f"the chat template {self.name!r} cannot be cut into turns: with an answer it renders {whole!r}, which "
                f"does not begin with its generation prompt {opened!r}",
                fix="set model.chat_template to chatml, or to a Jinja file whose generation prompt opens every answer",
            )
        self.trims = self._render_answer(f" {_ANSWER} ") == whole
        before, _, tail = whole[len(opened) :].partition(_ANSWER)
        self.response_prefix: str = before
        tail_ids = self._ids(tail)
        marked = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        self._end_text = ""
        if tail_ids and tail_ids[0] in {*self.eos_ids, *marked} and tail.startswith(self._token_text(tail_ids[0])):
            self._end_text = self._token_text(tail_ids[0])
            if tail_ids[0] != self.end_id or not self.end_is_structural:
                self.end_id, self.end_is_structural = tail_ids[0], False
                self.eos_ids = tuple(dict.fromkeys((*self.eos_ids, self.end_id)))

    def _render_answer(self, text: str) -> str:
        return self.render((*_PROBE, {"role": "assistant", "content": text}))

    # ---- text

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The template applied to the whole chat.  Raises DataError when the template refuses the messages."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    chat_template=self._source,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self._bindings,
                )
            )
        except Exception as error:
            roles = ", ".join(turn["role"] for turn in messages)
            raise DataError(
                f"the chat template {self.name!r} does not take these messages (roles {roles}): {error}",
                fix="set model.chat_template to chatml, which takes any roles, or change the data",
            ) from error

    def render_with_response(self, messages: Sequence[Message], response: str) -> str:
        """The whole chat with `response` as its answer."""
        return self.render((*messages, {"role": "assistant", "content": response}))

    def decode_response(self, ids: Sequence[int]) -> str:
        """Text of response ids, up to the first EOS and without the template's `response_prefix`."""
        closing = {*self.eos_ids, self.end_id}
        end = next((at for at, index in enumerate(ids) if index in closing), len(ids))
        text = str(self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False))
        return text.removeprefix(self.response_prefix)

    def special_texts(self) -> list[str]:
        """Texts that the tokenizer reads as special tokens, wherever they stand."""
        return [str(token.content) for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    # ---- pieces

    def _answer_text(self, content: str) -> str:
        return content.strip() if self.trims else content

    def _pieces(self, messages: Messages, add_generation_prompt: bool) -> list[str]:
        """Text before, between and after the assistant contents, found by marks in their place.

        Raises DataError when the pieces and the contents do not give the template's own rendering.
        """
        marks = [_MARK.format(index) for index in range(len(messages))]
        marked = [
            {**turn, "content": mark} if turn["role"] == "assistant" else turn
            for turn, mark in zip(messages, marks, strict=True)
        ]
        rest = self.render(marked, add_generation_prompt=add_generation_prompt)
        pieces, whole = [], ""
        for turn, mark in zip(messages, marks, strict=True):
            if turn["role"] != "assistant":
                continue
            piece, found, rest = rest.partition(mark)
            if not found or not piece.endswith(self.response_prefix):
                raise self._not_segmentable("it does not write every answer as it is")
            pieces.append(piece)
            whole += piece + self._answer_text(turn["content"])
        pieces.append(rest)
        if whole + rest != self.render(messages, add_generation_prompt=add_generation_prompt):
            raise self._not_segmentable("what it writes around a turn depends on the text of an answer")
        return pieces

    def _not_segmentable(self, reason: str) -> DataError:
        return DataError(
            f"the chat template {self.name!r} cannot be cut into turns for this conversation: {reason}",
            fix="set model.chat_template to chatml, or to a Jinja file that writes every turn alike",
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._cached_ids(text))

    def _tokenise(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        ids = self.tokenizer(self._anchor + text, add_special_tokens=False, verbose=False)["input_ids"]
        return tuple(ids[1:] if self._anchor else ids)

    def _segments(self, messages: Messages, pieces: Sequence[str]) -> list[tuple[list[int], bool]]:
        """(ids, produced by the assistant) in order; the piece after the last answer loses what is its end."""
        answers = [turn["content"] for turn in messages if turn["role"] == "assistant"]
        out: list[tuple[list[int], bool]] = []
        for at, piece in enumerate(pieces):
            if at > 0 and self._end_text and piece.startswith(self._end_text):
                out[-1][0].append(self.end_id)
                piece = piece.removeprefix(self._end_text)
            if at < len(answers):
                out.append((self._ids(piece[: len(piece) - len(self.response_prefix)]), False))
                out.append((self._ids(self.response_prefix + self._answer_text(answers[at])), True))
            else:
                out.append((self._ids(piece), False))
        first = out[0][0]
        if self._adds_prefix and first[: len(self._prefix_ids)] != self._prefix_ids:
            first[:0] = self._prefix_ids
        return out

    def _ended(self, ids: list[int]) -> list[int]:
        """The response with its end: one EOS, also when the text already brought one."""
        return ids if ids and ids[-1] in {*self.eos_ids, self.end_id} else [*ids, self.end_id]

    # ---- tokens

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to and with the generation prompt.  A BOS appears once at most.

        Raises DataError when the template refuses the messages or cannot be cut into turns.
        """
        turns = tuple(messages)
        segments = self._segments(turns, self._pieces(turns, add_generation_prompt=True))
        return [index for ids, _ in segments for index in ids]

    def encode_response(self, text: str, *, finished: bool = True) -> list[int]:
        """Ids of an answer with EOS appended; without it when the answer was cut (`finished=False`)."""
        ids = self._ids(self.response_prefix + self._answer_text(text))
        return self._ended(ids) if finished or self.end_is_structural else ids

    def encode_completion(
        self, prompt: Sequence[Message], completion: Sequence[Message], loss_on: LossOn = "assistant"
    ) -> Encoded:
        """The prompt is `encode_prompt(prompt)`; the response is every turn of `completion`.

        Assistant turns are trained, each with its EOS; the turns between them and what the template writes around them
        are holes.  Turns after the last assistant turn are not encoded.  `loss_on="completion"` trains the last
        assistant turn only, with the turns before it moved into the prompt; "all" see `encode_conversation`.
        Raises DataError when the completion does not begin with an assistant turn or the template cannot be cut.
        """
        before, after = tuple(prompt), tuple(completion)
        last = max((i for i, turn in enumerate(after) if turn["role"] == "assistant"), default=-1)
        if not after or after[0]["role"] != "assistant":
            raise DataError("a completion begins with an assistant turn", fix="move the other turns into the prompt")
        after = after[: last + 1]
        if loss_on == "completion":
            before, after = before + after[:-1], after[-1:]
        turns = before + after
        pieces = self._pieces(turns, add_generation_prompt=False)
        answered = sum(turn["role"] == "assistant" for turn in before)
        opening = self._cached_prompt_pieces(tuple((turn["role"], turn["content"]) for turn in before))
        if opening and [*opening[:-1], opening[-1] + self.response_prefix] != pieces[: answered + 1]:
            raise self._not_segmentable("the generation prompt differs from what stands before an answer")
        segments = self._segments(turns, pieces)
        cut = 2 * answered + 1
        prompt_ids = [index for ids, _ in segments[:cut] for index in ids]
        body = segments[cut:-1]
        body[-1] = (self._ended(body[-1][0]), True)
        response = [index for ids, _ in body for index in ids]
        trained = [produced for ids, produced in body for _ in ids]
        return train_on_all(prompt_ids, response) if loss_on == "all" else Encoded(prompt_ids, response, trained)

    def _opening(self, turns: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
        """Pieces of a prompt given as (role, content) pairs; none for a chat that begins with an answer."""
        messages = tuple({"role": role, "content": content} for role, content in turns)
        return tuple(self._pieces(messages, add_generation_prompt=True)) if messages else ()

    def encode_observation(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Ids between the last answer of a chat and the answer that is to follow: the tokens of the answers stay.

        What ends the answer's turn, the turns after it, and the generation prompt; tokenised alone, as everywhere here,
        so that ids before + answer + these ids are `encode_prompt(messages)` wherever the answer's own ids are.
        messages: the last answer's content is not read.  closed: it ends with an EOS already.
        Raises DataError when the template refuses the messages or does not write the answer where it stands.
        """
        turns = list(messages)
        last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=-1)
        if last < 0:
            raise DataError("an observation follows an answer, here there is none", fix="give messages with an answer")
        turns[last] = {**turns[last], "content": _ANSWER}
        _, found, rest = self.render(turns, add_generation_prompt=True).partition(_ANSWER)
        if not found:
            raise self._not_segmentable("it does not write every answer as it is")
        end: list[int] = []
        if self._end_text and rest.startswith(self._end_text):
            rest = rest.removeprefix(self._end_text)
            end = [] if closed else [self.end_id]
        return [*end, *self._ids(rest)]

    def encode_conversation(self, messages: Sequence[Message], loss_on: LossOn = "assistant") -> Encoded:
        """assistant: the response starts at the first assistant turn; later turns of others are holes in it.
        completion: the response is the last assistant turn.  all: every token but the first is trained.

        Raises DataError when there is no assistant turn, or as `encode_completion`; ConfigError for another loss_on.
        """
        if loss_on not in ("assistant", "completion", "all"):
            raise ConfigError(f"loss_on is {loss_on!r}", fix="use assistant, completion or all")
        turns = tuple(messages)
        answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        if not answers:
            raise DataError("the conversation has no assistant turn", fix="give conversations with an answer")
        return self.encode_completion(turns[: answers[0]], turns[answers[0] : answers[-1] + 1], loss_on)

    def encode_text(self, text: str) -> Encoded:
        """Plain text with EOS appended: the first token is the prompt, every later one is trained."""
        ids = self._ids(text)
        if self._prefix_ids and ids[: len(self._prefix_ids)] != self._prefix_ids:
            ids = [*self._prefix_ids, *ids]
        return train_on_all([], self._ended(ids))

    # ---- lengths

    def truncate_prompt(self, ids: Sequence[int], limit: int) -> list[int]:
        """At most `limit` ids: the start is lost, but not an opening BOS or [CLS]."""
        if len(ids) <= limit:
            return list(ids)
        opening = self._prefix_ids if list(ids[: len(self._prefix_ids)]) == self._prefix_ids else []
        keep = max(limit - len(opening), 0)
        return [*opening[:limit], *ids[len(ids) - keep :]]

    def truncate_response(self, ids: Sequence[int], limit: int) -> list[int]:
        """At most `limit` ids: the end is lost, and EOS with it; an encoder's closing token stays."""
        if len(ids) <= limit:
            return list(ids)
        return [*ids[: max(limit - 1, 0)], self.end_id][:limit] if self.end_is_structural else list(ids[:limit])


def train_on_all(prompt: Sequence[int], response: Sequence[int]) -> Encoded:
    """The same ids with the boundary after the first one: a token without context has no logprob to train."""
    ids = [*prompt, *response]
    return Encoded(ids[:1], ids[1:], [True] * (len(ids) - 1))
