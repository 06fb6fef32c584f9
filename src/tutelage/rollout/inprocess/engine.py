"""Rollouts from the training weights themselves, in this process.

Shapes: B sequences (prompts times samples, a prompt's samples adjacent), R flat response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tutelage.errors import RolloutError
from tutelage.math.keyed import sample_key
from tutelage.rollout.inprocess.stopping import Decoder, Stopping, decode_rows
from tutelage.rollout.inprocess.wave import Responses, Wave, WaveRunner, plan_waves
from tutelage.rollout.sampling import TRAINING_PURPOSE, SamplingParams, require_trainable
from tutelage.types import Prompts, Ragged, Rollout, Sequences

Progress = Callable[[int, int], None]
"""Called with (responses done, responses in all)."""


class InProcessRollout:
    """Samples with the model that is trained, adapter on, dropout off, no gradient; implements `RolloutEngine`.

    A sample's randomness is keyed by (seed, step, prompt id, sample index, purpose) and counted by response position,
    so the same sample comes out alone, in any batch and in any wave, as long as rounding of the logits (about 1e-6 in
    float32, more in bfloat16) does not move a draw across a boundary between two tokens.

    model             a causal language model whose attention implementation is "tutelage"; every mode is put back as it
                      was after each call.
    eos_ids           tokens that end a response; the token is part of the response and is trained on.
    params            defaults of `generate`; n and greedy come with the prompts.
    tokens_in_flight  bound on cached tokens (rows times slot length); what does not fit waits for the next wave.
    purpose           what `params` are for; truncated sampling is refused at once where that is training.
    forward_context   makes the context of the forward passes: the training engine's autocast, so both compute alike.
    prefill_tokens    prompt tokens packed into one forward pass.
    response_prefix   what the chat template writes before an answer: part of the tokens, taken off the texts.
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
    ) -> None:
        """Raises RolloutError for a truncating default in training, another attention, or layers without a KV cache."""
        require_trainable(params, purpose)
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.params = params
        self.seed = seed
        self.tokens_in_flight = tokens_in_flight
        self.progress = progress
        self.forward_context = forward_context
        self.prefill_tokens = prefill_tokens
        self.response_prefix = response_prefix
        self.version = 0
        self._config: Any = model.config
        _require_slotted(self._config)

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
        params = replace(self.params, n=prompts.n)
        return self.complete(prompts, params.with_greedy() if prompts.greedy else params)

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
            prompts = _bare_prompts(prompts)
        prompts = replace(prompts, n=params.n, greedy=params.greedy)
        require_trainable(params, prompts.purpose)
        self._require_room(prompts, params)
        return self._assemble(prompts, self._responses(prompts, params, progress or self.progress))

    def _responses(self, prompts: Prompts, params: SamplingParams, progress: Progress | None) -> Responses:
        """All B rows in order: prompt-major, samples inside."""
        device = next(self.model.parameters()).device
        stopping = Stopping(self.tokenizer, (*self.eos_ids, *params.stop_token_ids), params.stop, device)
        keys_B = self._keys(prompts, params)
        total = len(prompts) * params.n
        done = 0

        def report(ended: int) -> None:
            nonlocal done
            done += ended
            if progress is not None:
                progress(done, total)

        out = Responses(
            torch.zeros((total, params.max_new_tokens), dtype=torch.int64),
            torch.zeros((total, params.max_new_tokens)),
            torch.zeros(total, dtype=torch.int64),
            torch.zeros(total, dtype=torch.bool),
        )
        runner = WaveRunner(self.model, params, stopping, device, self.prefill_tokens, report)
        lens = [len(p) for p in prompts.tokens]
        with torch.no_grad(), evaluation_mode(self.model), self.forward_context():
            for rows in plan_waves(lens, params.n, params.max_new_tokens, self.tokens_in_flight):
                index = torch.tensor(rows)
                part = runner.run(_wave(prompts, rows, keys_B[index], params.n))
                for name in ("tokens", "logp", "lens", "finished"):
                    getattr(out, name)[index] = getattr(part, name)
        return out

    def _keys(self, prompts: Prompts, params: SamplingParams) -> Tensor:
        """(B,) int64."""
        seed = self.seed if params.seed is None else params.seed
        return torch.tensor(
            [
                sample_key(seed, prompts.step, prompt_id, sample, prompts.purpose)
                for prompt_id in prompts.ids
                for sample in range(params.n)
            ],
            dtype=torch.int64,
        )

    def _require_room(self, prompts: Prompts, params: SamplingParams) -> None:
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

    def _assemble(self, prompts: Prompts, out: Responses) -> Rollout:
        n, rows = prompts.n, len(prompts) * prompts.n
        group_B = torch.arange(len(prompts)).repeat_interleave(n)
        responses = Ragged.from_padded(out.tokens, out.lens)
        response_rows = responses.rows()
        prompt_rows = [torch.tensor(p, dtype=torch.int64) for p in prompts.tokens]
        sequences = Sequences(
            Ragged.from_rows([torch.cat([prompt_rows[b // n], response_rows[b]]) for b in range(rows)], torch.int64),
            torch.tensor([len(p) for p in prompts.tokens], dtype=torch.int64)[group_B],
            responses.with_flat(torch.ones_like(responses.flat, dtype=torch.bool)),
        )
        eos = set(self.eos_ids)
        shown = [row[:-1] if row and row[-1] in eos else row for row in (r.tolist() for r in response_rows)]
        texts = decode_rows(self.tokenizer, shown, skip_special_tokens=True)
        return Rollout(
            sequences=sequences,
            rollout_logp=Ragged.from_padded(out.logp, out.lens),
            finished=out.finished,
            prompt_ids=tuple(prompts.ids[b // n] for b in range(rows)),
            samples=torch.arange(n).repeat(len(prompts)),
            group=group_B,
            truths=tuple(prompts.truths[b // n] for b in range(rows)),
            messages=tuple(prompts.messages[b // n] for b in range(rows)),
            texts=tuple(text.removeprefix(self.response_prefix) for text in texts),
            weights_version=torch.full((rows,), self.version, dtype=torch.int64),
        )


def _bare_prompts(rows: Sequence[Sequence[int]]) -> Prompts:
    return Prompts(
        tokens=tuple(tuple(row) for row in rows),
        ids=tuple(str(i) for i in range(len(rows))),
        truths=(None,) * len(rows),
        messages=((),) * len(rows),
        purpose="complete",
    )


def _wave(prompts: Prompts, rows: Sequence[int], keys_B: Tensor, n: int) -> Wave:
    used = list(dict.fromkeys(row // n for row in rows))
    place = {prompt: i for i, prompt in enumerate(used)}
    return Wave(
        prompts=[prompts.tokens[p] for p in used],
        prompt_of=torch.tensor([place[row // n] for row in rows]),
        keys=keys_B,
        names=[prompts.ids[p] for p in used],
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


def _require_slotted(config: Any) -> None:
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
