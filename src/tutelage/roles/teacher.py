"""The teacher: a frozen policy of the same vocabulary, that a student learns from.

Shapes: R flat response tokens, C candidate tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tutelage.layout import Dispatch
from tutelage.protocols import Engine
from tutelage.types import Ragged, Rollout


class Teacher:
    """temperature  divides the logits, as in the student's sampling and logprobs.
    tokens       candidates are looked for among ids 0 .. tokens - 1, those that the tokenizer has.
    """

    DISPATCH: ClassVar[dict[str, Dispatch]] = {"logprobs": Dispatch.ROWS, "with_candidates": Dispatch.ROWS}

    def __init__(self, engine: Engine, temperature: float, tokens: int) -> None:
        self.engine = engine
        self.temperature = temperature
        self.tokens = tokens

    def logprobs(self, batch: Any) -> Ragged:
        """(R,) of the response tokens."""
        return self.engine.logprobs(batch.sequences, self.temperature)

    def with_candidates(self, rollout: Rollout, count: int) -> Rollout:
        """The rollout with `teacher_logp` (R), and `candidate_ids` and `candidate_logp` (R, count): the likeliest
        tokens at each position, likeliest first.  All from one pass.

        Raises ShapeError for more tokens than the tokenizer has.
        """
        logp, ids, top = self.engine.top_logprobs(rollout.sequences, count, self.temperature, below=self.tokens)
        return rollout.adding(teacher_logp=logp, candidate_ids=ids, candidate_logp=top)
