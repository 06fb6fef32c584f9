"""Packed rows in which sequences with one prompt share it: [prompt][response 1][response 2]...

Shapes: B sequences, N flat tokens of them, M tokens of the row, K keys.

The prompt's tokens are computed once.  A response's tokens look at the prompt and at the response itself, and their
positions go on where the prompt ends, so every hidden state is that of the sequence alone.  Right only where tokens
meet in causal attention and nowhere else.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tutelage.sharing import same_prompts
from tutelage.types import Sequences

NO_PREFIX = -1


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of a packed row, one after another, that look at themselves and at one earlier run.

    lens      tokens of each run.
    prefixes  which run each has before it; NO_PREFIX: none.
    """

    lens: tuple[int, ...]
    prefixes: tuple[int, ...]
    _keys: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def prefix_len(self, at: int) -> int:
        return 0 if self.prefixes[at] == NO_PREFIX else self.lens[self.prefixes[at]]

    def keys(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Where the keys of all runs are in the row (K,), each prefix before its run; the edges (runs + 1,) of the runs
        among the queries and among the keys."""
        if device not in self._keys:
            starts = [0, *itertools.accumulate(self.lens)]
            spans = []
            for at, size in enumerate(self.lens):
                if self.prefixes[at] != NO_PREFIX:
                    spans.append((starts[self.prefixes[at]], self.prefix_len(at)))
                spans.append((starts[at], size))
            key_lens = [size + self.prefix_len(at) for at, size in enumerate(self.lens)]
            found = (_runs(spans), torch.tensor(starts), torch.tensor([0, *itertools.accumulate(key_lens)]))
            self._keys[device] = (found[0].to(device), found[1].to(device), found[2].to(device))
        return self._keys[device]


@dataclass(frozen=True, eq=False)
class SharedRow:
    """flat, positions (M,) the tokens of the row, and where each is in its sequence.

    index  (N,) where the hidden state of every token of the sequences is in the row.
    """

    flat: Tensor
    positions: Tensor
    index: Tensor
    segments: Segments

    def to(self, device: torch.device) -> SharedRow:
        return SharedRow(self.flat.to(device), self.positions.to(device), self.index.to(device), self.segments)


def shared_row(sequences: Sequences) -> SharedRow | None:
    """None where no two sequences have the same prompt (`sharing.same_prompts`).

    Groups follow one another in the order of their first sequences, and so do sequences within a group.
    """
    first_B = same_prompts(sequences).tolist()
    if len(set(first_B)) == len(first_B):
        return None
    groups: dict[int, list[int]] = {}
    for b, first in enumerate(first_B):
        groups.setdefault(first, []).append(b)
    lens, prompts = sequences.tokens.lens.tolist(), sequences.prompt_lens.tolist()
    starts = [0, *itertools.accumulate(lens)]
    runs: list[tuple[int, int]] = []  # (start in the sequences' tokens, tokens)
    prefixes: list[int] = []
    places: list[list[tuple[int, int]]] = [[] for _ in lens]  # of every sequence: its runs (start in the row, tokens)
    size = 0
    for first, members in groups.items():
        shared = prompts[first] if len(members) > 1 else 0
        prefix, prompt = NO_PREFIX, (size, shared)
        if shared:
            prefix = len(runs)
            runs.append((starts[first], shared))
            prefixes.append(NO_PREFIX)
            size += shared
        for b in members:
            own = lens[b] - shared
            places[b] = [prompt, (size, own)]
            if own:
                runs.append((starts[b] + shared, own))
                prefixes.append(prefix)
                size += own
    take_M = _runs(runs)
    index_N = _runs([span for spans in places for span in spans])
    within_N = _runs([(0, n) for n in lens])
    flat = sequences.tokens.flat
    return SharedRow(
        flat[take_M.to(flat.device)],
        within_N[take_M],
        index_N,
        Segments(tuple(n for _, n in runs), tuple(prefixes)),
    )


def _runs(spans: list[tuple[int, int]]) -> Tensor:
    """All positions of (start, length) intervals, one after another."""
    start, size = torch.tensor(spans, dtype=torch.int64).view(-1, 2).unbind(1)
    shift = torch.repeat_interleave(start - (size.cumsum(0) - size), size)
    return torch.arange(shift.shape[0]) + shift


def attention_alone(config: Any) -> bool:
    """Whether a configuration that lists its layers has softmax attention only: nothing that carries a state along."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(text, "layer_types", None)
    return kinds is None or set(kinds) <= {"full_attention", "sliding_attention"}


def attention_cost(config: Any) -> float:
    """c: a sequence of n tokens costs n + c n^2, in units of the work of one token outside attention.

    Of one block, in multiplications and additions: its matrices take 2 W a token, W = H D (2 h + 2 g) + 3 H I; causal
    scores and sums over values take 2 h D n^2 together.  c = h D / W.

    H hidden size, h query and g key/value heads, D head size, I the inner size of the MLP; of a mixture of experts, all
    that a token visits.  0 for a configuration that does not say.  From the configuration alone, so that all ranks
    agree.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    if not hidden or not heads:
        return 0.0
    pairs = getattr(text, "num_key_value_heads", None) or heads
    head = getattr(text, "head_dim", None) or hidden // heads
    visited = getattr(text, "num_experts_per_tok", None)
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    if visited:
        inner = visited * (getattr(text, "moe_intermediate_size", None) or inner)
    if not isinstance(inner, int):
        return 0.0
    matrices = hidden * head * (2 * heads + 2 * pairs) + 3 * hidden * inner
    return heads * head / matrices
