"""Inference passes of one model over rows of any number: parts within a token budget, without gradient, back in order.

Shapes: B sequences, R flat response tokens, C candidates at a position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.engines.passes import micro_batches, problem_of, require_runnable
from tutelage.engines.pipeline import Job, Pipeline
from tutelage.engines.ranks import Ranks
from tutelage.math.logprobs import Asked
from tutelage.models.forward import Model, logprobs_and_values, token_outputs
from tutelage.models.language_model import LanguageModel
from tutelage.models.lora import adapter_off
from tutelage.types import Ragged, Sequences, flat_index


@dataclass(frozen=True, eq=False)
class Inference:
    """Collective on many ranks: each brings its own rows, of which there may be none.

    pipeline  the stages that the blocks are cut into; None: this rank has all of them.
    budget    tokens of one part.
    """

    model: Model
    ranks: Ranks
    pipeline: Pipeline | None
    budget: int

    def of_tokens(
        self, policy: LanguageModel, sequences: Sequences, asked: Asked, name: str, temperature: float, adapter: bool
    ) -> Ragged:
        """Ragged (R): one of `math.logprobs.distribution_outputs`; adapter False: of LoRA's base."""
        with nullcontext() if adapter else adapter_off(policy.adapted):
            return self.by_budget(
                sequences, sequences.response_lens, lambda part: token_outputs(policy, part, asked, temperature)[name]
            )

    def top_logprobs(
        self, policy: LanguageModel, sequences: Sequences, count: int, temperature: float, below: int | None
    ) -> tuple[Ragged, Ragged, Ragged]:
        """See `ModelEngine.top_logprobs`.  A row of the pass has a logprob, C = `count` ids, and their logprobs."""

        def of_part(part: Sequences) -> Tensor:
            found = token_outputs(policy, part, Asked(top=count, below=below), temperature)
            logp_R, ids_RC = found["logp"], found["top_ids"]
            return torch.cat([logp_R[:, None], ids_RC.to(logp_R.dtype), found["top_logp"]], dim=1)

        every = self.by_budget(sequences, sequences.response_lens, of_part, (1 + 2 * count,))
        logp_R1, ids_RC, top_RC = every.flat.split([1, count, count], dim=1)
        columns = (logp_R1.squeeze(1), ids_RC.to(torch.int64), top_RC.contiguous())
        return every.with_flat(columns[0].contiguous()), every.with_flat(columns[1]), every.with_flat(columns[2])

    def logprobs_and_values(
        self, policy: LanguageModel, sequences: Sequences, temperature: float
    ) -> tuple[Ragged, Ragged]:
        """See `ModelEngine.logprobs_and_values`.

        A row of the pass has the two side by side; the entry after the last token has no logprob.
        """

        def of_part(part: Sequences) -> Tensor:
            logp_R, values = logprobs_and_values(policy, part, temperature)
            both = torch.zeros(len(values.flat), 2, device=values.flat.device)
            both[_but_last(values), 0] = logp_R.to(both)
            both[:, 1] = values.flat
            return both

        every = self.by_budget(sequences, sequences.response_lens + 1, of_part, (2,))
        logp = Ragged(every.flat[_but_last(every), 0], sequences.response_lens)
        return logp, every.with_flat(every.flat[:, 1].contiguous())

    def by_budget(
        self,
        sequences: Sequences,
        lens_B: Tensor,
        run: Callable[[Sequences], Tensor],
        entry: tuple[int, ...] = (),
    ) -> Ragged:
        """`run` on parts within the token budget, without gradient; rows of length `lens`, back in their order.

        entry: the shape of one entry.
        """
        self.model.module.eval()
        flat = torch.zeros(int(lens_B.sum()), *entry, device=lens_B.device)
        wanted = frozenset({"logp"}) if isinstance(self.model, LanguageModel) else frozenset({"score"})
        error = problem_of(lambda: require_runnable(self.model, sequences, wanted)) if len(sequences) else None
        self.ranks.agree(error)
        parts = micro_batches(self.model, sequences, self.budget) if len(sequences) else []
        idle = self.ranks.most(len(parts)) - len(parts)
        found = self._each([*(sequences.select(index_b) for index_b in parts), *[IDLE] * idle], run)
        for index_b, out in zip(parts, found, strict=False):
            flat[flat_index(lens_B, index_b)] = out.to(flat)
        return Ragged(flat if self.pipeline is None else self.pipeline.stages.from_last(flat), lens_B)

    @torch.no_grad()
    def _each(self, parts: list[Sequences], run: Callable[[Sequences], Tensor]) -> list[Tensor]:
        """Of pipeline stages the last one has the results."""
        if self.pipeline is None:
            return [self.model.root(lambda part=part: run(part)) for part in parts]
        found, error = self.pipeline.forward([Job(part, functools.partial(run, part)) for part in parts])
        self.ranks.agree(error)
        return found


def _but_last(rows: Ragged) -> Tensor:
    """(N,) bool: every entry but the last one of each row."""
    keep = torch.ones(len(rows.flat), dtype=torch.bool, device=rows.flat.device)
    keep[rows.offsets()[1:] - 1] = False
    return keep


IDLE = Sequences.build([[0]], [[0]])
"""What a rank without rows runs along with the others."""
