"""Partial rollouts with the training weights themselves: responses that are continued in a later call.

A row begins or goes on from its prompt and its response so far, which are prefilled together under the present weights.
Token t of a response draws number t of its key, in whichever call it comes, so that without a change of weights a
response is the same however it was cut.
"""

from __future__ import annotations

import torch

from tutelage.rollout.inprocess.admission import Request
from tutelage.rollout.inprocess.engine import InProcessRollout, evaluation_mode
from tutelage.rollout.partial import Carried, Limit, Sample, ShouldStop, require_partial, rollout_of, samples_of
from tutelage.rollout.sampling import require_trainable
from tutelage.types import Prompts, Rollout


class InProcessPartial:
    """Implements `partial.PartialRollout` beside an `InProcessRollout`, with its model, seed and parameters."""

    def __init__(self, engine: InProcessRollout) -> None:
        self.engine = engine

    def generate_partial(
        self,
        prompts: Prompts,
        carried: Carried | None = None,
        budget_tokens: int | None = None,
        should_stop: ShouldStop | None = None,
    ) -> tuple[Rollout, Carried]:
        """See `partial.PartialRollout`.  Carried samples begin first, in their order, the oldest at the head, however
        long they are; those not begun are carried on as they are.

        Raises RolloutError as `InProcessRollout.generate`, for greedy prompts, and for a budget below 1.
        """
        engine, params = self.engine, self.engine.params
        require_partial(prompts, budget_tokens)
        require_trainable(params, prompts.purpose)
        engine.require_room(prompts, params)
        before = carried.samples if carried is not None else ()
        samples = self._sampled([*before, *samples_of(prompts)], len(before), Limit(budget_tokens, should_stop))
        whole = [s for s in samples if self._whole(s)]
        rest = tuple(s for s in samples if not self._whole(s))
        batch = rollout_of(whole, engine.tokenizer, engine.eos_ids, engine.response_prefix, engine.version)
        return batch, Carried(rest)

    def _whole(self, sample: Sample) -> bool:
        return sample.finished or len(sample.response) >= self.engine.params.max_new_tokens

    def _sampled(self, samples: list[Sample], carried: int, limit: Limit) -> list[Sample]:
        """The samples with what this call adds to them; the first `carried` of them begin first, in this order."""
        engine = self.engine
        open_rows = [row for row, sample in enumerate(samples) if not self._whole(sample)]
        requests = [
            Request(
                tokens=(*samples[row].prompt, *samples[row].response),
                key=samples[row].key(engine.seed),
                name=samples[row].prompt_id,
                done=len(samples[row].response),
                priority=min(row, carried),
            )
            for row in open_rows
        ]
        batch = engine.start(requests, engine.params, [samples[row].response for row in open_rows])
        with torch.no_grad(), evaluation_mode(engine.model), engine.forward_context():
            while batch.busy and not limit.reached():
                sampled = batch.sampled
                batch.step()
                limit.sampled += batch.sampled - sampled
        engine.cache = batch.use
        tokens, logps = batch.tokens.tolist(), batch.logp.tolist()
        lens, finished = batch.lens.tolist(), batch.finished.tolist()
        for i, row in enumerate(open_rows):
            new = slice(requests[i].done, lens[i])
            samples[row] = samples[row].extended(tokens[i][new], logps[i][new], engine.version, finished[i])
        return samples
