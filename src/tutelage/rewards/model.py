"""A reward model as a reward source, with the policy's tokenizer or with one of its own.

Shapes: B sequences, S prompt+response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tutelage.errors import RewardError
from tutelage.rewards.checks import require_scores, row_name
from tutelage.types import Ragged, Rollout, Sequences

_PROBES = ("Hello, world! 12345", "  two  spaces\n\nHuman: naïve café 漢字 🙂", "don't_stop(x=[1, 2])\t")


class RewardTemplate(Protocol):
    """How the reward model was shown a conversation in training (`data.chat.ChatTemplate`)."""

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]: ...
    def encode_response(self, text: str, *, finished: bool = True) -> Sequence[int]:
        """With the token that ends a turn, unless the response was cut and the template can do without."""
        ...


class RewardModelSource:
    """Scores rollouts with a reward model.

    scorer      (B,) scores of sequences, each read at its last real token: an engine's `scores`.
    template    None: the reward model shares the policy's tokenizer and template, and sees the very tokens that were
                sampled.  Otherwise the messages and the response's text are rendered through this template and
                tokenised again, the end of the turn after finished responses only.
    max_tokens  the reward model's context.  A longer input loses its start (the response stays as long as it can) and
                is counted in `cut`; `seen` counts all inputs.
    start_ids   a first token among these (CLS, BOS) stays when the start is cut.
    """

    def __init__(
        self,
        scorer: Callable[[Sequences], Tensor],
        template: RewardTemplate | None = None,
        *,
        max_tokens: int | None = None,
        start_ids: Collection[int] = (),
        name: str = "reward_model",
    ) -> None:
        if max_tokens is not None and max_tokens < 2:
            raise RewardError(f"the reward model's context is {max_tokens} tokens", fix="use a model with a longer one")
        self.scorer = scorer
        self.template = template
        self.max_tokens = max_tokens
        self.start_ids = frozenset(start_ids)
        self.name = name
        self.seen = 0
        self.cut = 0

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32. Raises RewardError for a prompt without messages to render, a wrong count, NaN or infinity."""
        sequences = rollout.sequences if self.template is None else self._rendered(rollout, self.template)
        if self.max_tokens is not None:
            sequences, cut = keep_end(sequences, self.max_tokens, self.start_ids)
            self.cut += cut
        self.seen += len(rollout)
        fix = "the reward model's weights hold NaN or overflow: train it again, or use float32"
        return require_scores(self.scorer(sequences), rollout, f"the reward model {self.name}", fix)

    def _rendered(self, rollout: Rollout, template: RewardTemplate) -> Sequences:
        encoded: dict[tuple[tuple[str, str], ...], list[int]] = {}
        prompts: list[list[int]] = []
        for row, messages in enumerate(rollout.messages):
            if not messages:
                raise RewardError(
                    f"{row_name(rollout, row)} has no messages, which this reward model's own template needs",
                    fix="give the prompts as chat messages or text, or use a reward model with the policy's tokenizer",
                )
            key = tuple((message["role"], message["content"]) for message in messages)
            if key not in encoded:
                encoded[key] = list(template.encode_prompt(messages))
            prompts.append(encoded[key])
        ended = zip(rollout.texts, rollout.finished.tolist(), strict=True)
        responses = [list(template.encode_response(text, finished=finished)) for text, finished in ended]
        return Sequences.build(prompts, responses)


def keep_end(sequences: Sequences, max_tokens: int, start_ids: Collection[int] = ()) -> tuple[Sequences, int]:
    """Sequences of at most `max_tokens`, cut at the start, and how many were cut.

    A first token in `start_ids` is kept in front of what remains. A prompt gives way before its response does.
    """
    long_B = sequences.tokens.lens > max_tokens
    cut = int(long_B.sum())
    if not cut:
        return sequences, 0
    tokens: list[Tensor] = []
    trained: list[Tensor] = []
    prompt_lens: list[int] = []
    rows = zip(
        sequences.tokens.rows(), sequences.trained.rows(), sequences.prompt_lens.tolist(), long_B.tolist(), strict=True
    )
    for row, mask, prompt, too_long in rows:
        if too_long:
            head = row[: int(prompt > 0 and int(row[0]) in start_ids)]
            dropped = row.shape[0] - max_tokens
            lost_response = max(0, dropped - (prompt - head.shape[0]))
            row = torch.cat([head, row[head.shape[0] + dropped :]])
            mask = mask[lost_response:]
            prompt = row.shape[0] - mask.shape[0]
        tokens.append(row)
        trained.append(mask)
        prompt_lens.append(prompt)
    return (
        Sequences(
            Ragged.from_rows(tokens, torch.int64),
            torch.tensor(prompt_lens, dtype=torch.int64),
            Ragged.from_rows(trained, torch.bool),
        ),
        cut,
    )


def same_tokenizer(first: Any, second: Any) -> bool:
    """Whether two tokenizers give every text the same ids and every id the same meaning.

    Compared are the vocabularies with their added tokens, the EOS tokens, and the ids of a few texts with white space,
    accents, ideographs and symbols. Chat templates are not: compare those beside this.
    """
    if first.get_vocab() != second.get_vocab() or first.eos_token_id != second.eos_token_id:
        return False
    return all(
        first(text, add_special_tokens=False)["input_ids"] == second(text, add_special_tokens=False)["input_ids"]
        for text in _PROBES
    )
