"""Partial rollouts with the training weights themselves: responses that are continued in a later call.

Shapes: B rows (samples), b rows still decoding, T response tokens, M prompt and response tokens of all rows.

A row begins or goes on from its prompt and its response so far, which are prefilled together under the present weights.
Token t of a response draws number t of its key, in whichever call it comes, so that without a change of weights a
response is the same however it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutelage.errors import RolloutError
from tutelage.rollout.inprocess.cache import SlottedCache
from tutelage.rollout.inprocess.engine import InProcessRollout, evaluation_mode
from tutelage.rollout.inprocess.stopping import Stopping
from tutelage.rollout.inprocess.wave import Wave, WaveRunner, plan_waves
from tutelage.rollout.partial import Carried, Limit, Sample, ShouldStop, require_partial, rollout_of, samples_of
from tutelage.rollout.sampling import require_trainable, sample_tokens
from tutelage.types import Prompts, Rollout


@dataclass
class _Rows:
    """Tokens and logprobs that each row of a wave got in this call."""

    tokens: list[list[int]] = field(default_factory=list)
    logps: list[list[float]] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)

    @classmethod
    def empty(cls, rows: int) -> _Rows:
        return cls([[] for _ in range(rows)], [[] for _ in range(rows)], [False] * rows)


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
        """See `partial.PartialRollout`.  Waves run one after another; those not begun are carried on as they are.

        Raises RolloutError as `InProcessRollout.generate`, for greedy prompts, and for a budget below 1.
        """
        engine, params = self.engine, self.engine.params
        require_partial(prompts, budget_tokens)
        require_trainable(params, prompts.purpose)
        engine._require_room(prompts, params)
        samples = [*(carried.samples if carried is not None else ()), *samples_of(prompts)]
        limit = Limit(budget_tokens, should_stop)
        sizes = [len(s.prompt) for s in samples]
        with torch.no_grad(), evaluation_mode(engine.model), engine.forward_context():
            for rows in plan_waves(sizes, 1, params.max_new_tokens, engine.tokens_in_flight):
                if limit.reached():
                    break
                got = self._wave([samples[row] for row in sorted(rows)], limit)
                for i, row in enumerate(sorted(rows)):
                    samples[row] = samples[row].extended(got.tokens[i], got.logps[i], engine.version, got.ended[i])
        whole = [s for s in samples if self._whole(s)]
        rest = tuple(s for s in samples if not self._whole(s))
        batch = rollout_of(whole, engine.tokenizer, engine.eos_ids, engine.response_prefix, engine.version)
        return batch, Carried(rest)

    def _whole(self, sample: Sample) -> bool:
        return sample.finished or len(sample.response) >= self.engine.params.max_new_tokens

    def _wave(self, samples: Sequence[Sample], limit: Limit) -> _Rows:
        engine, params = self.engine, self.engine.params
        device = next(engine.model.parameters()).device
        stopping = Stopping(engine.tokenizer, (*engine.eos_ids, *params.stop_token_ids), params.stop, device)
        runner = WaveRunner(engine.model, params, stopping, device, engine.prefill_tokens, lambda ended: None)
        wave = Wave(
            prompts=[(*s.prompt, *s.response) for s in samples],
            prompt_of=torch.arange(len(samples)),
            keys=torch.tensor([s.key(engine.seed) for s in samples], dtype=torch.int64),
            names=[s.prompt_id for s in samples],
        )
        prompt_lens = torch.tensor([len(s.prompt) for s in samples], device=device)
        done_B = torch.tensor([len(s.response) for s in samples], device=device)
        cache = SlottedCache(len(samples), int(prompt_lens.max()) + params.max_new_tokens)
        got = _Rows.empty(len(samples))
        row_b, done_b = torch.arange(len(samples), device=device), done_B
        logits_bV = runner._prefill(wave, cache, wave.prompt_of.to(device))
        while True:
            token_b, logp_b = sample_tokens(logits_bV, wave.keys.to(device)[row_b], done_b, params)
            self._record(samples, got, row_b, token_b, logp_b, stopping)
            limit.sampled += row_b.shape[0]
            done_b = done_b + 1
            over = [got.ended[row] or self._length(samples[row], got, row) for row in row_b.tolist()]
            keep_b = torch.tensor([not o for o in over], device=device).nonzero().squeeze(1)
            if not keep_b.shape[0] or limit.reached():
                return got
            position_b = prompt_lens[row_b] + done_b - 1
            if keep_b.shape[0] < row_b.shape[0]:
                cache.begin_decode(position_b, int(position_b.max()))  # how far the slots are filled
                cache.compact(keep_b)
                row_b, done_b, token_b, position_b = row_b[keep_b], done_b[keep_b], token_b[keep_b], position_b[keep_b]
            logits_bV = runner._decode(token_b, position_b, int(position_b.max()) + 1, cache)

    def _length(self, sample: Sample, got: _Rows, row: int) -> bool:
        return len(sample.response) + len(got.tokens[row]) >= self.engine.params.max_new_tokens

    def _record(
        self, samples: Sequence[Sample], got: _Rows, row_b: Tensor, token_b: Tensor, logp_b: Tensor, stopping: Stopping
    ) -> None:
        """Add one token to each row, and whether it ended the response."""
        for row, token, logp in zip(row_b.tolist(), token_b.tolist(), logp_b.tolist(), strict=True):
            if logp != logp or logp == float("-inf"):
                at = len(samples[row].response) + len(got.tokens[row])
                raise RolloutError(
                    f"the logits for prompt {samples[row].prompt_id!r} are not finite at response token {at}",
                    fix="the weights hold NaN or infinity, or overflow in this dtype: use float32",
                )
            got.tokens[row].append(token)
            got.logps[row].append(logp)
            response = torch.tensor([[*samples[row].response, *got.tokens[row]]], device=token_b.device)
            alive = torch.ones(1, dtype=torch.bool, device=token_b.device)
            ended = stopping.ended(response[0, -1:], response, torch.zeros_like(alive).long(), alive, response.shape[1])
            got.ended[row] = bool(ended)
