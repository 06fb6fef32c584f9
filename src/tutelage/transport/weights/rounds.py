"""The rounds in which a plan is carried out, so that no rank stages more than a bucket.  Torch-free.

A round is one collective that every rank of the group enters, in the same order: no rank can wait for another one's
later round, so no deadlock is possible.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tutelage.errors import ConfigError
from tutelage.transport.weights.boxes import Box, Weight

FILL = 4
"""A piece is at most a quarter of a rank's share of a round, so that a round is at least three quarters full."""


@dataclass(frozen=True)
class Transfer:
    """Rank `src` sends the slice `box` of weight `name` to rank `dst`."""

    src: int
    dst: int
    name: str
    box: Box
    nbytes: int


@dataclass(frozen=True)
class Round:
    """Pieces of weights whose elements have one size; ordered by (src, dst), then as in the plan."""

    itemsize: int
    pieces: tuple[Transfer, ...]

    def of(self, rank: int) -> Round:
        """The pieces that a rank sends or receives."""
        return Round(self.itemsize, tuple(piece for piece in self.pieces if rank in (piece.src, piece.dst)))


def rounds(transfers: Sequence[Transfer], weights: Mapping[str, Weight], bucket_bytes: int) -> list[Round]:
    """Every transfer, cut into pieces.  In a round no rank sends more than half a bucket, nor receives more.

    Raises ConfigError for a bucket that cannot hold one element each way.
    """
    check_bucket(weights, bucket_bytes)
    found: list[Round] = []
    for itemsize in sorted({weight.itemsize for weight in weights.values()}, reverse=True):
        alike = [t for t in transfers if weights[t.name].itemsize == itemsize]
        found += [Round(itemsize, pieces) for pieces in _filled(alike, bucket_bytes // 2, itemsize)]
    return found


def check_bucket(weights: Mapping[str, Weight], bucket_bytes: int) -> None:
    """Raises ConfigError for a bucket that cannot hold one element each way."""
    least = 2 * max((weight.itemsize for weight in weights.values()), default=1)
    if bucket_bytes < least:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}", fix=f"use at least {least}; 64 MiB is usual")


def _filled(transfers: list[Transfer], capacity: int, itemsize: int) -> Iterator[tuple[Transfer, ...]]:
    sent: defaultdict[tuple[int, int], int] = defaultdict(int)
    received: defaultdict[tuple[int, int], int] = defaultdict(int)
    first_out: defaultdict[int, int] = defaultdict(int)
    first_in: defaultdict[int, int] = defaultdict(int)
    filled: defaultdict[int, list[Transfer]] = defaultdict(list)
    grain = max(capacity // FILL, itemsize)
    for transfer in transfers:
        for piece in pieces(transfer, grain, itemsize):
            src, dst, index = piece.src, piece.dst, max(first_out[piece.src], first_in[piece.dst])
            while max(sent[src, index], received[dst, index]) + piece.nbytes > capacity:
                index += 1
            sent[src, index] += piece.nbytes
            received[dst, index] += piece.nbytes
            filled[index].append(piece)
            while sent[src, first_out[src]] > capacity - grain:
                first_out[src] += 1
            while received[dst, first_in[dst]] > capacity - grain:
                first_in[dst] += 1
    for index in sorted(filled):
        yield tuple(sorted(filled[index], key=lambda piece: (piece.src, piece.dst)))


def pieces(transfer: Transfer, limit: int, itemsize: int) -> list[Transfer]:
    """A transfer cut into boxes of at most `limit` bytes, along its first dimensions; an element is never cut."""
    cut = _cut(transfer.box, transfer.nbytes, limit, itemsize)
    return [Transfer(transfer.src, transfer.dst, transfer.name, box, nbytes) for box, nbytes in cut]


def _cut(box: Box, nbytes: int, limit: int, itemsize: int) -> list[tuple[Box, int]]:
    if nbytes <= limit or nbytes <= itemsize:
        return [(box, nbytes)]
    dim = next(i for i, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    row = nbytes // (stop - start)
    step = max(1, limit // row)
    found: list[tuple[Box, int]] = []
    for low, high in itertools.pairwise([*range(start, stop, step), stop]):
        part = (*box[:dim], (low, high), *box[dim + 1 :])
        found += _cut(part, row * (high - low), limit, itemsize)
    return found
