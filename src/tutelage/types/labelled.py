"""Answers with labels: of the whole answer, or of each of its steps.   Shapes: B sequences, N steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tutelage.types.batches import _Columns
from tutelage.types.ragged import Ragged, Sequences


@dataclass(frozen=True, eq=False)
class Labelled(_Columns):
    """B answers, each desirable or not.

    desirable  (B,) bool.
    ref_logp   Ragged (R): the reference's logprobs.      old_logp: the policy's before the update.
    shift      (B,) what BCO takes off the implicit reward of each answer.
    """

    sequences: Sequences
    desirable: Tensor
    ids: tuple[str, ...]
    ref_logp: Ragged | None = None
    old_logp: Ragged | None = None
    shift: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def item_tokens(self) -> Tensor:
        return self.sequences.tokens.lens


@dataclass(frozen=True, eq=False)
class StepLabels(_Columns):
    """B answers in steps; `sequences.trained` marks the last token of every step.

    labels  Ragged (N): how good each step is, one entry for each marked token; 1 right and 0 wrong where binary.
    """

    sequences: Sequences
    labels: Ragged
    ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sequences)

    def item_tokens(self) -> Tensor:
        return self.sequences.tokens.lens
