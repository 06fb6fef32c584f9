"""Rollouts from the training weights themselves, in this process.

Shapes: B sequences (prompts times samples, a prompt's samples adjacent), b some of them, R flat response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tutelage.errors import RolloutError
from tutelage.math.keyed import sample_key
from tutelage.rollout.inprocess.admission import Request
from tutelage.rollout.inprocess.batch import Bounds, CacheUse, ContinuousBatch
from tutelage.rollout.inprocess.stopping import Decoder, Stopping, decode_rows
from tutelage.rollout.partial import bare_prompts
from tutelage.rollout.sampling import TRAINING_PURPOSE, SamplingParams, require_trainable
from tutelage.types import Prompts, Ragged, Rollout, Sequences

Progress = Callable[[int, int], None]
"""Called with (responses done, responses in all)."""


class InProcessRollout:
    """Samples with the model that is trained, adapter on, dropout off, no gradient; implements `RolloutEngine`.

    A sample's randomness is keyed by (seed, step, prompt id, sample index, purpose) and counted by response position,
    so the same sample comes out alone, in any batch and with any bound, as long as rounding of the logits (about 1e-6
    in float32, more in bfloat16) does not move a draw across a boundary between two tokens.

    model             a causal language model whose attention implementation is "tutelage"; every mode is put back as it
                      was after each call.
    eos_ids           tokens that end a response; the token is part of the response and is trained on.
    params            defaults of `generate`; n and greedy come with the prompts.
    tokens_in_flight  bound on cached tokens; a prompt counts once for all its samples, and a sample with all it may yet
                      need.  What does not fit waits.  The cache is allocated once per call, never beyond this bound nor
                      what the call can fill; `cache` says how large it was.
    slots             samples that decode together at most.
    purpose           what `params` are for; truncated sampling is refused at once where that is training.
    forward_context   makes the context of the forward passes: the training engine's autocast, so both compute alike.
    prefill_tokens    prompt tokens packed into one forward pass.
    response_prefix   what the chat template writes before an answer: part of the tokens, taken off the texts.

    cache             of the last call: its bound in tokens and bytes, and how much of it was in use; None before one.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Decoder,
        eos_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        tokens_in_flight: int = 65536,
        purpose: str = TRAINING_PURPOSE,
        progress: Progress | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        prefill_tokens: int = 8192,
        response_prefix: str = "",
        slots: int = 256,
    ) -> None:
        """Raises RolloutError for a truncating default in training, another attention, or layers without a KV cache."""
        require_trainable(params, purpose)
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.params = params
        self.seed = seed
        self.bounds = Bounds(tokens_in_flight, slots, prefill_tokens)
        self.progress = progress
        self.forward_context = forward_context
        self.response_prefix = response_prefix
        self.cache: CacheUse | None = None
        self.version = 0
        self._config: Any = model.config
        _require_pageable(self._config)

    @property
    def tokens_in_flight(self) -> int:
        return self.bounds.tokens

    def publish(self, version: int) -> None:
        """The weights are shared, so there is nothing to move; later rollouts carry this version."""
        self.version = version

    def rest(self) -> None:
        """Nothing is held between calls."""

    def generate(self, prompts: Prompts) -> Rollout:
        """`prompts.n` responses to each prompt, under the default parameters; greedy where the prompts say so.

        Raises RolloutError: truncated sampling in training; an empty prompt; a prompt whose response may not fit the
        model's context or `tokens_in_flight`; logits that are not finite.
        """
        return self.complete(prompts, self._defaults(prompts))

    def complete(
        self,
        prompts: Prompts | Sequence[Sequence[int]],
        params: SamplingParams,
        progress: Progress | None = None,
    ) -> Rollout:
        """`params.n` responses to each prompt under these parameters, for evaluation and chat; see `texts`.

        Bare rows of token ids are taken as prompts named "0", "1"... with the purpose "complete". Errors as `generate`.
        """
        if not isinstance(prompts, Prompts):
            prompts = bare_prompts(prompts)
        prompts = replace(prompts, n=params.n, greedy=params.greedy)
        batch = self._batch(prompts, params)
        done = 0
        with torch.no_grad(), evaluation_mode(self.model), self.forward_context():
            while batch.busy:
                done = self._report(progress or self.progress, done, batch.step(), len(batch.requests))
        self.cache = batch.use
        return self._assemble(prompts, batch, range(len(prompts)))

    def stream(self, prompts: Prompts) -> Iterator[Rollout]:
        """The rows of `generate`, one prompt at a time, all its samples together, as soon as the last of them is done.

        `Rollout.concat` of the parts, sorted by their `group`, equals `generate(prompts)`.  Closing the iterator gives
        up what is not done.  Between two parts the model is as it was found: other work may use it.
        Not for weights that are sharded over ranks: gathering them is collective, and parts are ready at other times on
        other ranks.
        The weights must stay the same until the last part; raises RolloutError where `publish` was called in between,
        and as `generate`.  What can be refused at once is refused before the first part is asked for.
        """
        params = self._defaults(prompts)
        return self._parts(prompts, self._batch(prompts, params))

    def _parts(self, prompts: Prompts, batch: ContinuousBatch) -> Iterator[Rollout]:
        missing, done, version = [prompts.n] * len(prompts), 0, self.version
        while batch.busy:
            ready: list[int] = []
            with torch.no_grad(), evaluation_mode(self.model), self.forward_context():
                while batch.busy and not ready:
                    ended = batch.step()
                    done = self._report(self.progress, done, ended, len(batch.requests))
                    for row in ended:
                        missing[row // prompts.n] -= 1
                    ready = sorted({row // prompts.n for row in ended if not missing[row // prompts.n]})
            self.cache = batch.use
            for place, prompt in enumerate(ready, start=1):
                yield self._assemble(prompts, batch, [prompt])
                if self.version != version and (batch.busy or place < len(ready)):
                    raise RolloutError(
                        f"weights of version {self.version} were published while responses of version {version} stream",
                        fix="close the stream, or read it to its end, before the weights change",
                    )

    def _defaults(self, prompts: Prompts) -> SamplingParams:
        params = replace(self.params, n=prompts.n)
        return params.with_greedy() if prompts.greedy else params

    def _batch(self, prompts: Prompts, params: SamplingParams) -> ContinuousBatch:
        """All B requests in order: prompt-major, samples inside."""
        require_trainable(params, prompts.purpose)
        self.require_room(prompts, params)
        keys = self._keys(prompts, params)
        requests = [
            Request(prompts.tokens[row // params.n], key, prompts.ids[row // params.n]) for row, key in enumerate(keys)
        ]
        return self.start(requests, params)

    def start(
        self, requests: Sequence[Request], params: SamplingParams, prior: Sequence[Sequence[int]] = ()
    ) -> ContinuousBatch:
        """A batch of these requests, to be stepped inside `evaluation_mode` and `forward_context`; prior: see there."""
        device = next(self.model.parameters()).device
        stopping = Stopping(self.tokenizer, (*self.eos_ids, *params.stop_token_ids), params.stop, device)
        return ContinuousBatch(self.model, requests, params, stopping, device, self.bounds, prior)

    def _report(self, progress: Progress | None, done: int, ended: Sequence[int], total: int) -> int:
        """Responses done with those that have just ended."""
        if progress is not None and ended:
            progress(done + len(ended), total)
        return done + len(ended)

    def _keys(self, prompts: Prompts, params: SamplingParams) -> list[int]:
        """Of all B rows."""
        seed = self.seed if params.seed is None else params.seed
        return [
            sample_key(seed, prompts.step, prompt_id, sample, prompts.purpose)
            for prompt_id in prompts.ids
            for sample in range(params.n)
        ]

    def require_room(self, prompts: Prompts, params: SamplingParams) -> None:
        """Raises RolloutError for an empty prompt, and for one whose response may not fit."""
        context = getattr(self._config, "max_position_embeddings", None)
        window = getattr(self._config, "sliding_window", None)
        for name, tokens in zip(prompts.ids, prompts.tokens, strict=True):
            size = len(tokens) + params.max_new_tokens
            what = f"prompt {name!r} has {len(tokens)} tokens and may get {params.max_new_tokens} more: {size}"
            if not tokens:
                raise RolloutError(f"prompt {name!r} is empty", fix="give it at least one token, such as a BOS")
            if context is not None and size > context:
                fix = "lower rollout.max_new_tokens or data.max_prompt_tokens"
                raise RolloutError(f"{what}, the model's context is {context}", fix=fix)
            if window is not None and size > window:
                fix = f"keep prompt and response within {window} tokens"
                raise RolloutError(f"{what}, past the sliding attention window of {window}", fix=fix)
            if size > self.tokens_in_flight:
                fix = f"raise rollout.tokens_in_flight to at least {size}"
                raise RolloutError(f"{what}, rollout.tokens_in_flight is {self.tokens_in_flight}", fix=fix)

    def _assemble(self, prompts: Prompts, batch: ContinuousBatch, chosen: Sequence[int]) -> Rollout:
        """The rows of the prompts `chosen`, all of which have ended."""
        n = prompts.n
        prompt_b = torch.tensor(chosen, dtype=torch.int64).repeat_interleave(n)
        row_b = (torch.tensor(chosen, dtype=torch.int64)[:, None] * n + torch.arange(n)).reshape(-1)
        lens_b, pick_b = batch.lens[row_b], row_b.to(batch.tokens.device)
        responses = Ragged.from_padded(batch.tokens[pick_b].cpu(), lens_b)
        response_rows, of = responses.rows(), prompt_b.tolist()
        prompt_rows = {p: torch.tensor(prompts.tokens[p], dtype=torch.int64) for p in chosen}
        tokens = [torch.cat([prompt_rows[p], row]) for p, row in zip(of, response_rows, strict=True)]
        sequences = Sequences(
            Ragged.from_rows(tokens, torch.int64),
            torch.tensor([len(prompts.tokens[p]) for p in of], dtype=torch.int64),
            responses.with_flat(torch.ones_like(responses.flat, dtype=torch.bool)),
        )
        eos = set(self.eos_ids)
        shown = [row[:-1] if row and row[-1] in eos else row for row in (r.tolist() for r in response_rows)]
        texts = decode_rows(self.tokenizer, shown, skip_special_tokens=True)
        return Rollout(
            sequences=sequences,
            rollout_logp=Ragged.from_padded(batch.logp[pick_b].cpu(), lens_b),
            finished=batch.finished[row_b],
            prompt_ids=tuple(prompts.ids[p] for p in of),
            samples=torch.arange(n).repeat(len(chosen)),
            group=prompt_b,
            truths=tuple(prompts.truths[p] for p in of),
            messages=tuple(prompts.messages[p] for p in of),
            texts=tuple(text.removeprefix(self.response_prefix) for text in texts),
            weights_version=torch.full((len(of),), self.version, dtype=torch.int64),
        )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off and no activation checkpointing inside; every submodule's mode is put back, also on an error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _require_pageable(config: Any) -> None:
    implementation = getattr(config, "_attn_implementation", None)
    if implementation != "tutelage":
        raise RolloutError(
            f"the model's attention implementation is {implementation!r}",
            fix='load the model with attn_implementation="tutelage"; another would let packed prompts see each other',
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    unfit = sorted(kinds - {"full_attention", "sliding_attention"})
    if unfit:
        raise RolloutError(
            f"the model has layers of type {', '.join(unfit)}",
            fix="in-process rollouts need attention layers with a key/value cache; use another rollout engine",
        )
