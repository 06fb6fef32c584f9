"""Token parallelism: one packed row of segments cut over ranks, which meet inside attention and nowhere else.

Shapes: N tokens of the row, M tokens of the padded row, n tokens of one rank, m of one context share, H hidden,
R positions that are read, h query heads, g key/value heads, D head size, C context ranks, U sequence ranks.

Every peer is given the same rows.  The row is padded to a multiple of the ranks by a filler segment, which attends to
itself alone and is read by nobody, and cut in two levels, the sequence axis inside the context axis:

    context   (C shares)  a share's queries look at the keys and values of all shares, gathered
              (Llama 3, arXiv:2407.21783, section 3.3.2) or passed round a ring (Liu et al. 2023, arXiv:2310.01889).
              Share c is chunk c and chunk 2C - 1 - c of the row cut in 2C: in a causal row, an equal part of the work.
    sequence  (U parts)  before attention an all-to-all turns n tokens of all heads into U n tokens of 1/U of the heads,
              and after it another turns them back (Ulysses, Jacobs et al. 2023, arXiv:2309.14509).  Key/value heads
              that the ranks do not divide are repeated just often enough.

The collectives are those of cut rows (`collectives`): each of the C U peers holds the whole loss, divides it by C U,
and the peers sum their weight gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tutelage.errors import ModelError
from tutelage.models.parallel.collectives import exchanged, gathered, summed
from tutelage.types import Ragged


@dataclass(frozen=True)
class Pieces:
    """Local queries as runs inside one segment each, with the keys they look at.

    query_lens, key_lens  of each piece; queries and keys of the pieces follow one another.
    offsets               of a piece's first query among its keys.
    key_index             (keys,) where the pieces' keys are in the gathered row; None: they are it, in order.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    offsets: tuple[int, ...]
    key_index: Tensor | None


LocalAttention = Callable[[Tensor, Tensor, Tensor, Pieces], Tensor]
"""query (1, h, m, D), key and value (1, g, keys, D), pieces -> (1, h, m, D)."""


@dataclass(frozen=True, eq=False)
class TokenParallel:
    """context, sequence: this rank's groups along the two axes; None where the axis has one rank.

    ring  pass keys and values round the context ranks instead of gathering them: memory of one share, not of the row.
    """

    context: ProcessGroup | None = None
    sequence: ProcessGroup | None = None
    ring: bool = False

    @property
    def contexts(self) -> int:
        return 1 if self.context is None else dist.get_world_size(self.context)

    @property
    def sequences(self) -> int:
        return 1 if self.sequence is None else dist.get_world_size(self.sequence)

    @property
    def size(self) -> int:
        """Peers that hold the same rows: what each divides its loss by."""
        return self.contexts * self.sequences

    def total(self, x: Tensor) -> Tensor:
        """The sum over all peers, on every peer."""
        for group in (self.sequence, self.context):
            x = x if group is None else summed(x, group)
        return x

    def cut(self, tokens: Ragged) -> TokenCut:
        """This rank's part of the row of `tokens`, on their device."""
        size, contexts, sequences = tokens.flat.shape[0], self.contexts, self.sequences
        step = sequences if contexts == 1 else 2 * contexts * sequences
        padded = size + -size % step
        edges = [0, *tokens.lens.cumsum(0).tolist()]
        runs = tuple(tuple(_runs(padded, contexts, c)) for c in range(contexts))
        place, part = _rank(self.context), _rank(self.sequence)
        device = tokens.flat.device
        share_m = _indices(runs[place], device)
        index_n = share_m[part * (padded // self.size) : (part + 1) * (padded // self.size)]
        return TokenCut(self, size, padded, tuple(edges + ([padded] if padded > size else [])), runs, place, index_n)


def token_parallel(mesh: DeviceMesh, *, ring: bool = False) -> TokenParallel | None:
    """From the dimensions named "context" and "sequence" of a mesh; None where neither has more than one rank."""
    groups = {
        name: mesh.get_group(name)
        for name in ("context", "sequence")
        if name in (mesh.mesh_dim_names or ()) and mesh[name].size() > 1
    }
    return TokenParallel(groups.get("context"), groups.get("sequence"), ring) if groups else None


def sequence_obstacle(config: Any, sequence: int, tensor: int = 1) -> str | None:
    """Why a model of this configuration cannot be cut over `sequence` Ulysses ranks, or None where it can."""
    heads = getattr(config, "num_attention_heads", None)
    if sequence == 1:
        return None
    if not isinstance(heads, int):
        return f"a {config.model_type} model does not say how many attention heads it has"
    local = heads // tensor
    if local % sequence:
        each = f"{heads} attention heads" + (f", {local} on each of {tensor} tensor ranks" if tensor > 1 else "")
        return f"{each}: {sequence} sequence ranks do not divide them; {divisors(local)} would"
    return None


def divisors(number: int) -> str:
    """Every divisor, as words: `1, 2 or 4`."""
    found = [str(d) for d in range(1, number + 1) if number % d == 0]
    return " or ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else found[0]


@dataclass(frozen=True, eq=False)
class TokenCut:
    """One rank's part of one packed row.

    size, padded  N and M.
    edges         of the segments, filler included: 0 ... M.
    runs          of every context share: intervals of the row, in the order in which the share holds them.
    place         this rank's context share.
    index         (n,) int64: where each local token is in the row; N and above in the filler.
    """

    parallel: TokenParallel
    size: int
    padded: int
    edges: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]
    place: int
    index: Tensor
    _pieces: dict[bool, Pieces] = field(default_factory=dict)

    def take(self, flat_N: Tensor, filler: int) -> Tensor:
        """(n,) the local part of a row of N numbers."""
        return torch.cat([flat_N, flat_N.new_full((self.padded - self.size,), filler)])[self.index]

    def local(self, index_R: Tensor) -> tuple[Tensor, Tensor]:
        """Of positions of the row: (r,) where those that are here are among the local tokens, (r,) which ones."""
        place_M = self.index.new_full((self.padded,), -1)
        place_M[self.index] = torch.arange(self.index.shape[0], device=place_M.device)
        place_R = place_M[index_R.to(place_M.device)]
        pick_r = torch.nonzero(place_R >= 0).squeeze(1)
        return place_R[pick_r], pick_r

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, local: LocalAttention) -> Tensor:
        """query (1, h, n, D), key and value (1, g, n, D) -> (1, n, h, D); `local` attends within pieces.

        Raises ModelError where the sequence ranks do not divide the query heads, before anything is sent.
        """
        groups = self.parallel
        if groups.sequence is not None:
            query, key, value = heads_apart(query, key, value, groups.sequence)
        pieces = self.pieces(causal)
        if groups.context is not None:
            key, value = _all_tokens(key, groups.context), _all_tokens(value, groups.context)
        if pieces.key_index is not None:
            key, value = key.index_select(2, pieces.key_index), value.index_select(2, pieces.key_index)
        out = local(query, key, value, pieces)
        return self.tokens_apart(out).transpose(1, 2)

    def tokens_apart(self, out: Tensor) -> Tensor:
        """(1, h / U, U n, D) -> (1, h, n, D): after attention, this rank's tokens with all heads."""
        group = self.parallel.sequence
        if group is None:
            return out
        ranks = self.parallel.sequences
        _, heads, tokens, width = out.shape
        parts = out.view(heads, ranks, tokens // ranks, width).transpose(0, 1)
        return exchanged(parts, group).reshape(1, heads * ranks, tokens // ranks, width)

    def pieces(self, causal: bool) -> Pieces:
        """Of this rank's context share. Causal queries look no further than the piece they are in."""
        if causal not in self._pieces:
            self._pieces[causal] = self._find_pieces(causal)
        return self._pieces[causal]

    def _find_pieces(self, causal: bool) -> Pieces:
        query_lens, offsets, keys = [], [], []
        for start, end in self.runs[self.place]:
            for first, last in itertools.pairwise(self.edges):
                begin, stop = max(start, first), min(end, last)
                if begin < stop:
                    query_lens.append(stop - begin)
                    offsets.append(begin - first)
                    keys.append((first, stop if causal else last))
        index = None
        if self.parallel.context is not None:
            device = self.index.device
            row_M = torch.cat([_indices(runs, device) for runs in self.runs])
            gathered_M = torch.empty_like(row_M)
            gathered_M[row_M] = torch.arange(self.padded, device=device)
            index = gathered_M[_indices(keys, device)]
        return Pieces(tuple(query_lens), tuple(end - start for start, end in keys), tuple(offsets), index)

    def coordinates(self) -> tuple[Tensor, Tensor]:
        """(M,) the segment and (M,) the place in it of every token, in the order of the gathered shares."""
        device = self.index.device
        edges = torch.tensor(self.edges, device=device)
        row_M = torch.cat([_indices(runs, device) for runs in self.runs])
        segment_M = torch.searchsorted(edges, row_M, right=True) - 1
        return segment_M, row_M - edges[segment_M]


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _runs(padded: int, contexts: int, place: int) -> list[tuple[int, int]]:
    """The two chunks of a context share; one run where they touch."""
    if contexts == 1:
        return [(0, padded)]
    chunk, far = padded // (2 * contexts), 2 * contexts - 1 - place
    if far == place + 1:
        return [(place * chunk, (far + 1) * chunk)]
    return [(place * chunk, (place + 1) * chunk), (far * chunk, (far + 1) * chunk)]


def _indices(intervals: Any, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, end, device=device) for start, end in intervals])


def heads_apart(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """(1, h, n, D) -> (1, h / U, U n, D): all of the share's tokens, 1/U of the heads; key/value heads with theirs."""
    ranks, heads, pairs = dist.get_world_size(group), query.shape[1], key.shape[1]
    if heads % ranks:
        raise ModelError(
            f"{heads} attention heads cannot be divided over {ranks} sequence ranks",
            fix=f"set the sequence axis to {divisors(heads)}",
        )
    repeats = ranks // math.gcd(pairs, ranks)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return _swap(query, ranks, group), _swap(key, ranks, group), _swap(value, ranks, group)


def _swap(x: Tensor, ranks: int, group: ProcessGroup) -> Tensor:
    _, heads, tokens, width = x.shape
    parts = exchanged(x.reshape(ranks, heads // ranks, tokens, width), group)
    return parts.transpose(0, 1).reshape(1, heads // ranks, ranks * tokens, width)


def _all_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """(1, g, m, D) -> (1, g, M, D), shares in the order of the ranks."""
    parts = gathered(x[0], group)
    return parts.transpose(0, 1).reshape(1, x.shape[1], -1, x.shape[3])
