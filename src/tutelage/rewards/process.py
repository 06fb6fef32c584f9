"""A process reward model's scores of the steps of an answer as one score of the answer.

Shapes: B sequences, R flat response tokens, N steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutelage.data.steps import step_ends
from tutelage.errors import RewardError
from tutelage.math.process_reward import combined_steps
from tutelage.types import Ragged, Sequences


class StepScorer:
    """A scorer for `RewardModelSource`: (B,) scores of sequences.

    token_scores   the model's scalar at each response token: an engine's `token_scores`.
    separator      text between steps; each is scored at its last token, as in training (`data.steps:step_ends`).
    combine        min, product, last or mean of the steps.
    probabilities  the model was trained with step_bce: its scalars are logits, the score of a step their sigmoid.
    """

    def __init__(
        self,
        token_scores: Callable[[Sequences], Ragged],
        tokenizer: Any,
        separator: str,
        combine: str,
        *,
        probabilities: bool,
    ) -> None:
        self.token_scores = token_scores
        self.tokenizer = tokenizer
        self.separator = separator
        self.combine = combine
        self.probabilities = probabilities

    def __call__(self, sequences: Sequences) -> Tensor:
        """(B,) float32.  Raises RewardError for a response without tokens."""
        ends = [step_ends(self.tokenizer, row, self.separator) for row in sequences.response_rows()]
        empty = next((row for row, at in enumerate(ends) if not at), None)
        problem = None if empty is None else f"row {empty} has a response without tokens, which has no step to score"
        starts = (sequences.response_lens.cumsum(0) - sequences.response_lens).tolist()
        scores = self.token_scores(sequences).flat  # every rank takes part, also one that has a problem
        if problem is not None:
            raise RewardError(problem, fix="score it with a rule function, or leave such responses out")
        index_N = torch.tensor([start + at for start, row in zip(starts, ends, strict=True) for at in row])
        score_N = scores[index_N.to(device=scores.device, dtype=torch.int64)].float()
        steps_B = torch.tensor([len(row) for row in ends], dtype=torch.int64)
        return combined_steps(torch.sigmoid(score_N) if self.probabilities else score_N, steps_B, self.combine)
