"""One wave: prompts prefilled packed, then all their samples decoded together, step by step.

Shapes: B rows (samples) of the wave, b rows still decoding, P prompts of the wave, N packed prompt tokens,
M prompt tokens times samples, T response tokens, V vocabulary.

The work in Python per decode step does not grow with the number of rows, but for those that may have met a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tutelage.errors import RolloutError
from tutelage.rollout.inprocess.cache import SlottedCache
from tutelage.rollout.inprocess.stopping import Stopping
from tutelage.rollout.sampling import SamplingParams, sample_tokens

_COMPACT_BELOW = 0.8
"""Rows are compacted when fewer than this share of the decoded rows is alive."""


@dataclass(frozen=True, eq=False)
class Wave:
    """What is generated together. `prompt_of` (B,) points into `prompts` and is ascending; keys (B,) int64."""

    prompts: Sequence[Sequence[int]]
    prompt_of: Tensor
    keys: Tensor
    names: Sequence[str]


@dataclass(frozen=True, eq=False)
class Responses:
    """tokens, logp (B, T): valid up to lens (B,); finished (B,) bool."""

    tokens: Tensor
    logp: Tensor
    lens: Tensor
    finished: Tensor


def plan_waves(prompt_lens: Sequence[int], n: int, max_new_tokens: int, tokens_in_flight: int) -> Iterator[list[int]]:
    """Rows (prompt * n + sample) of each wave: slots times slot length never pass `tokens_in_flight`.

    Prompts go by length, so that the slots of a wave, all as long as its longest needs, waste little.
    """
    wave: list[int] = []
    for prompt in sorted(range(len(prompt_lens)), key=lambda p: prompt_lens[p]):
        slot = prompt_lens[prompt] + max_new_tokens
        for sample in range(n):
            if wave and (len(wave) + 1) * slot > tokens_in_flight:
                yield wave
                wave = []
            wave.append(prompt * n + sample)
    if wave:
        yield wave


class WaveRunner:
    """Generates one wave with a model whose attention implementation takes `cu_seq_lens_q` and `slot_mask`."""

    def __init__(
        self,
        model: nn.Module,
        params: SamplingParams,
        stopping: Stopping,
        device: torch.device,
        prefill_tokens: int,
        report: Callable[[int], None],
    ) -> None:
        """report: called with the number of rows that have just ended."""
        self.model = model
        self.params = params
        self.stopping = stopping
        self.device = device
        self.prefill_tokens = prefill_tokens
        self.report = report

    def run(self, wave: Wave) -> Responses:
        """Raises RolloutError, naming the prompt, when the model's logits are not finite."""
        prompt_of_B = wave.prompt_of.to(self.device)
        prompt_lens_P = torch.tensor([len(p) for p in wave.prompts], device=self.device)
        longest = int(prompt_lens_P.max())
        rows = prompt_of_B.shape[0]
        cache = SlottedCache(rows, longest + self.params.max_new_tokens)
        logits_BV = self._prefill(wave, cache, prompt_of_B)[prompt_of_B]

        steps = self.params.max_new_tokens
        tokens_BT = torch.zeros((rows, steps), dtype=torch.int64, device=self.device)
        logp_BT = torch.zeros((rows, steps), dtype=torch.float32, device=self.device)
        lens_B = torch.zeros(rows, dtype=torch.int64, device=self.device)
        finished_B = torch.zeros(rows, dtype=torch.bool, device=self.device)
        row_b = torch.arange(rows, device=self.device)
        keys_b, start_b = wave.keys.to(self.device), prompt_lens_P[prompt_of_B]
        alive_b, alive = torch.ones_like(finished_B), rows
        for t in range(steps):
            token_b, logp_b = sample_tokens(logits_BV, keys_b, torch.full_like(keys_b, t), self.params)
            tokens_BT[row_b, t] = token_b
            logp_BT[row_b, t] = logp_b.float()
            lens_B[row_b] += alive_b
            ended_b = self.stopping.ended(token_b, tokens_BT, row_b, alive_b, t + 1)
            finished_B[row_b] |= ended_b
            broken_b = alive_b & ~logp_b.isfinite()
            alive_b = alive_b & ~ended_b
            still, broken = torch.stack([alive_b.sum(), broken_b.sum()]).tolist()
            if broken:
                _refuse(wave, int(row_b[broken_b][0]), t)
            if still < alive:
                self.report(alive - still)
                alive = still
            if not alive or t + 1 == steps:
                break
            if alive < _COMPACT_BELOW * row_b.shape[0]:
                keep_b = alive_b.nonzero().squeeze(1)
                cache.compact(keep_b)
                row_b, keys_b, start_b, token_b = row_b[keep_b], keys_b[keep_b], start_b[keep_b], token_b[keep_b]
                alive_b = alive_b[keep_b]
            logits_BV = self._decode(token_b, start_b + t, longest + t + 1, cache)
        if alive:
            self.report(alive)
        return Responses(tokens_BT.cpu(), logp_BT.cpu(), lens_B.cpu(), finished_B.cpu())

    def _prefill(self, wave: Wave, cache: SlottedCache, prompt_of_B: Tensor) -> Tensor:
        """(P, V) logits after the last token of each prompt; keys and values go to the slots of all its samples."""
        logits, first = [], 0
        while first < len(wave.prompts):
            last, tokens = first, 0
            while last < len(wave.prompts) and (
                last == first or tokens + len(wave.prompts[last]) <= self.prefill_tokens
            ):
                tokens += len(wave.prompts[last])
                last += 1
            logits.append(self._prefill_part(wave.prompts[first:last], first, cache, prompt_of_B))
            first = last
        return torch.cat(logits)

    def _prefill_part(
        self, prompts: Sequence[Sequence[int]], first: int, cache: SlottedCache, prompt_of_B: Tensor
    ) -> Tensor:
        lens_P = torch.tensor([len(p) for p in prompts], device=self.device)
        starts = torch.cat([lens_P.new_zeros(1), lens_P.cumsum(0)])
        tokens_N = torch.tensor([t for p in prompts for t in p], dtype=torch.int64, device=self.device)
        position_N = torch.arange(tokens_N.shape[0], device=self.device) - torch.repeat_interleave(starts[:-1], lens_P)

        slot_b = ((prompt_of_B >= first) & (prompt_of_B < first + len(prompts))).nonzero().squeeze(1)
        prompt_b = prompt_of_B[slot_b] - first
        copied_b = lens_P[prompt_b]
        position_M = torch.arange(int(copied_b.sum()), device=self.device)
        position_M = position_M - torch.repeat_interleave(copied_b.cumsum(0) - copied_b, copied_b)
        source_M = torch.repeat_interleave(starts[prompt_b], copied_b) + position_M
        cache.begin_prefill(source_M, torch.repeat_interleave(slot_b, copied_b), position_M)
        out = self.model(
            input_ids=tokens_N[None],
            position_ids=position_N[None],
            past_key_values=cache,
            use_cache=True,
            cu_seq_lens_q=starts.to(torch.int32),
            logits_to_keep=starts[1:] - 1,
        )
        return out.logits[0]

    def _decode(self, token_b: Tensor, position_b: Tensor, width: int, cache: SlottedCache) -> Tensor:
        """(b, V) logits after `token`, which stands at `position` of its sequence."""
        slot_mask = cache.begin_decode(position_b, width)
        out = self.model(
            input_ids=token_b[:, None],
            position_ids=position_b[:, None],
            past_key_values=cache,
            use_cache=True,
            slot_mask=slot_mask,
        )
        return out.logits[:, -1]


def _refuse(wave: Wave, row: int, t: int) -> None:
    raise RolloutError(
        f"the logits for prompt {wave.names[int(wave.prompt_of[row])]!r} are not finite at response token {t}",
        fix="the weights hold NaN or infinity, or overflow in this dtype: look at the last updates, or use float32",
    )
