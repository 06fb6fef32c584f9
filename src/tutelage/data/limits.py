"""Length limits of one row: what is dropped, what is cut, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tutelage.data.chat import ChatTemplate
from tutelage.data.preflight import Tally


@dataclass(frozen=True)
class Fitted:
    """A prompt and its responses, each with its mask, within the limits."""

    prompt: list[int]
    responses: tuple[tuple[list[int], list[bool]], ...]


@dataclass(frozen=True)
class Limits:
    """Limits in tokens; None: no limit.  too_long: drop, truncate, or error (rows go, and the caller raises)."""

    template: ChatTemplate
    tally: Tally
    too_long: str
    prompt: int
    response: int | None
    context: int | None

    def fit(
        self, row: str, prompt: Sequence[int], responses: Sequence[tuple[Sequence[int], Sequence[bool]]]
    ) -> Fitted | None:
        """The row within the limits, or None when it is dropped.  Every response keeps the same prompt.

        Truncation: a prompt loses its start, a response its end and with it EOS (counted as without_eos).  A prompt and
        response over the context lose the start of the prompt, down to half the context, then the end of the response.
        """
        action = "truncated" if self.too_long == "truncate" else "dropped"
        prompt_limit, response_limit = self.prompt, self.response
        longest = max((len(ids) for ids, _ in responses), default=0)
        over = False
        if len(prompt) > prompt_limit:
            self.tally.too_long("prompt_over_length", row, action, len(prompt), prompt_limit)
            over = True
        if response_limit is not None and longest > response_limit:
            self.tally.too_long("response_over_length", row, action, longest, response_limit)
            over = True
        if over and action == "dropped":
            return None
        prompt_room = min(len(prompt), prompt_limit)
        response_room = longest if response_limit is None else min(longest, response_limit)
        if self.context is not None and prompt_room + response_room > self.context:
            self.tally.too_long("over_context", row, action, prompt_room + response_room, self.context)
            if action == "dropped":
                return None
            prompt_room = min(prompt_room, max(self.context - response_room, self.context // 2 if responses else 0))
            response_room = min(response_room, self.context - prompt_room)
        cut = tuple(self._cut(row, ids, trained, response_room) for ids, trained in responses)
        if any(not any(trained) for _, trained in cut):
            self.tally.add("empty_response", row, "dropped")
            return None
        return Fitted(self.template.truncate_prompt(prompt, prompt_room), cut)

    def _cut(self, row: str, ids: Sequence[int], trained: Sequence[bool], room: int) -> tuple[list[int], list[bool]]:
        if len(ids) <= room:
            return list(ids), list(trained)
        kept = self.template.truncate_response(ids, room)
        if not self.template.end_is_structural:
            self.tally.add("without_eos", row, "truncated")
        return kept, list(trained[: len(kept)])
