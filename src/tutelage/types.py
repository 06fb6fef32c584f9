"""The data that flows: ragged columns, token sequences, rollouts, preference pairs.

Shapes: B sequences, S prompt+response tokens, T response tokens, P pairs, K named scores, N flat tokens,
R flat response tokens.  A flat tensor plus lengths is the only storage; `(B, T)` padding is made for `math/` only.
Nothing is ever left-padded, and no meaning is read from a token being equal to `pad` or `eos`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from tutelage.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Ragged:
    """B rows of different length, flat: `flat` (N, ...) and `lens` (B,) int64 with `lens.sum() == N`."""

    flat: Tensor
    lens: Tensor

    def __post_init__(self) -> None:
        if self.lens.ndim != 1 or int(self.lens.sum()) != self.flat.shape[0]:
            raise ShapeError(f"lengths sum to {int(self.lens.sum())}, the flat tensor has {self.flat.shape[0]} rows")

    def __len__(self) -> int:
        return self.lens.shape[0]

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor], dtype: torch.dtype | None = None) -> Ragged:
        """One tensor per row -> flat. An empty sequence of rows gives an empty column."""
        lens = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
        flat = torch.cat(list(rows)) if rows else torch.empty(0)
        return cls(flat if dtype is None else flat.to(dtype), lens)

    @classmethod
    def from_padded(cls, x_BT: Tensor, lens: Tensor) -> Ragged:
        """The first `lens[b]` entries of each row of `(B, T, ...)`."""
        return cls(x_BT[valid_mask(lens, x_BT.shape[1])], lens)

    def padded(self, fill: float = 0) -> Tensor:
        """`(B, T, ...)` with T the longest row; right-padded with `fill`."""
        width = int(self.lens.max()) if len(self) else 0
        out = self.flat.new_full((len(self), width, *self.flat.shape[1:]), fill)
        out[valid_mask(self.lens, width)] = self.flat
        return out

    def with_flat(self, flat: Tensor) -> Ragged:
        """The same row lengths over another flat tensor."""
        return Ragged(flat, self.lens)

    def offsets(self) -> Tensor:
        """(B + 1,) start of each row in `flat`, and the end of the last."""
        return torch.cat([self.lens.new_zeros(1), self.lens.cumsum(0)])

    def rows(self) -> list[Tensor]:
        """A list of B views."""
        return list(torch.split(self.flat, self.lens.tolist()))

    def select(self, index_B: Tensor) -> Ragged:
        """Rows `index_B`, in that order."""
        return Ragged(self.flat[flat_index(self.lens, index_B)], self.lens[index_B])

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(self.flat.to(device), self.lens.to(device))

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        return cls(torch.cat([p.flat for p in parts]), torch.cat([p.lens for p in parts]))


def valid_mask(lens: Tensor, width: int) -> Tensor:
    """(B, width) bool: position < length."""
    return torch.arange(width, device=lens.device)[None, :] < lens[:, None]


def flat_index(lens: Tensor, index_B: Tensor) -> Tensor:
    """Flat positions of rows `index_B`, in that order, without a Python loop over rows."""
    picked = lens[index_B]
    starts = torch.cat([lens.new_zeros(1), lens.cumsum(0)])[index_B]
    row_start = torch.repeat_interleave(starts, picked)
    within = torch.arange(int(picked.sum()), device=lens.device)
    within = within - torch.repeat_interleave(picked.cumsum(0) - picked, picked)
    return row_start + within


@dataclass(frozen=True, eq=False)
class Sequences:
    """B token sequences, each a prompt followed by a response.

    tokens   Ragged over S (prompt + response).
    prompt_lens (B,)  tokens of the prompt; the response is the rest.  The boundary is a token boundary, always.
    trained  Ragged bool over T (response): tokens the policy produced and is trained on.  False marks tool or
             environment tokens inside the response (a hole).
    """

    tokens: Ragged
    prompt_lens: Tensor
    trained: Ragged

    def __post_init__(self) -> None:
        if not torch.equal(self.trained.lens, self.tokens.lens - self.prompt_lens):
            raise ShapeError("prompt_lens + response lengths differ from the token lengths")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def build(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        trained: Sequence[Sequence[bool]] | None = None,
    ) -> Sequences:
        """From token-id lists; every response token is trained unless `trained` says otherwise."""
        rows = [torch.tensor([*p, *r], dtype=torch.int64) for p, r in zip(prompts, responses, strict=True)]
        masks = trained if trained is not None else [[True] * len(r) for r in responses]
        return cls(
            Ragged.from_rows(rows, torch.int64),
            torch.tensor([len(p) for p in prompts], dtype=torch.int64),
            Ragged.from_rows([torch.tensor(m, dtype=torch.bool) for m in masks], torch.bool),
        )

    @property
    def response_lens(self) -> Tensor:
        return self.trained.lens

    def response_index(self) -> Tensor:
        """(R,) flat positions of the response tokens in `tokens.flat`."""
        keep = torch.repeat_interleave(self.prompt_lens, self.tokens.lens)
        within = torch.arange(self.tokens.flat.shape[0], device=keep.device)
        within = within - torch.repeat_interleave(self.tokens.offsets()[:-1], self.tokens.lens)
        return torch.nonzero(within >= keep).squeeze(1)

    def responses(self) -> Ragged:
        return Ragged(self.tokens.flat[self.response_index()], self.response_lens)

    def prompt_rows(self) -> list[list[int]]:
        return [r[:n].tolist() for r, n in zip(self.tokens.rows(), self.prompt_lens.tolist(), strict=True)]

    def response_rows(self) -> list[list[int]]:
        return [r.tolist() for r in self.responses().rows()]

    def select(self, index_B: Tensor) -> Sequences:
        return Sequences(self.tokens.select(index_B), self.prompt_lens[index_B], self.trained.select(index_B))

    def to(self, device: torch.device | str) -> Sequences:
        return Sequences(self.tokens.to(device), self.prompt_lens.to(device), self.trained.to(device))

    @classmethod
    def concat(cls, parts: Sequence[Sequences]) -> Sequences:
        return cls(
            Ragged.concat([p.tokens for p in parts]),
            torch.cat([p.prompt_lens for p in parts]),
            Ragged.concat([p.trained for p in parts]),
        )


@dataclass(frozen=True, eq=False)
class Prompts:
    """P prompts to be answered: token ids, an id that keys the randomness, and what a reward rule may need.

    ids        stable names of the prompts (the same in every run and at every batch size).
    truths     ground truth per prompt for rule rewards, or None.
    messages   the chat behind each prompt, a tuple of {"role", "content"}; for reward models with another template.
    step, n    the training step and samples per prompt; they key the randomness.
    greedy     evaluation only: take the most likely token.
    """

    tokens: tuple[tuple[int, ...], ...]
    ids: tuple[str, ...]
    truths: tuple[Any, ...]
    messages: tuple[tuple[dict[str, str], ...], ...]
    step: int = 0
    n: int = 1
    purpose: str = "rollout"
    greedy: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, index: Sequence[int]) -> Prompts:
        pick = list(index)
        return replace(
            self,
            tokens=tuple(self.tokens[i] for i in pick),
            ids=tuple(self.ids[i] for i in pick),
            truths=tuple(self.truths[i] for i in pick),
            messages=tuple(self.messages[i] for i in pick),
        )


def _select(value: Any, index_B: Tensor) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value[index_B]
    if isinstance(value, tuple):
        return tuple(value[i] for i in index_B.tolist())
    return value.select(index_B)


def _concat(values: list[Any]) -> Any:
    first = values[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, tuple):
        return tuple(item for value in values for item in value)
    return type(first).concat(values)


class _Columns:
    """Row-wise operations shared by every batch type; a column is a Tensor, a Ragged, Sequences or a tuple of B."""

    _whole: tuple[str, ...] = ()

    def adding(self, **columns: Any) -> Self:
        """A copy with these columns set; an unknown name raises TypeError."""
        return replace(self, **columns)  # type: ignore[type-var]

    def select(self, index_B: Tensor) -> Self:
        names = [f.name for f in fields(self) if f.name not in self._whole]  # type: ignore[arg-type]
        return replace(self, **{n: _select(getattr(self, n), index_B) for n in names})  # type: ignore[type-var]

    def minibatches(self, epochs: int, count: int, permutation: Callable[[int, int], Tensor]) -> Iterator[Self]:
        """`epochs` passes, each cut into `count` mini-batches of near-equal size; every item once per pass.

        permutation(epoch, n) -> (n,) the order of a pass.
        """
        size = len(self)  # type: ignore[arg-type]
        if size < count:
            raise ShapeError(f"{count} mini-batches cannot be cut from {size} items", fix="lower the mini-batch count")
        for epoch in range(epochs):
            for part in torch.tensor_split(permutation(epoch, size), count):
                yield self.select(part)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        out = {n: getattr(parts[0], n) if n in cls._whole else _concat([getattr(p, n) for p in parts]) for n in names}
        return cls(**out)


@dataclass(frozen=True, eq=False)
class Scores(_Columns):
    """What the reward sources said: values (B, K) in their own units, their weighted sum total (B,), and K names."""

    values: Tensor
    total: Tensor
    names: tuple[str, ...]

    _whole = ("names",)


@dataclass(frozen=True, eq=False)
class Rollout(_Columns):
    """B sampled responses and everything computed on them; every optional column starts as None and is set by `adding`.

    rollout_logp  Ragged (R): the sampler's own logprob of each response token, under the distribution it sampled from.
    finished      (B,) bool: ended by an EOS, a stop token or a stop string; False means the length limit cut it.
    prompt_ids, samples (B,)  key of the randomness;  group (B,) index of the prompt in its batch.
    old_logp      Ragged (R): the trainer's logprobs before any update.      ref_logp: the reference's.
    value         Ragged (R + B): V before each response token, and one bootstrap value after the last.
    score         named scores and their weighted total, per sequence.
    token_reward  Ragged (R) per-token rewards, optional.
    advantage, ret  Ragged (R): set by the algorithm.
    counted       (B,) bool: rows that the loss counts, set by the algorithm; None: all.
    """

    sequences: Sequences
    rollout_logp: Ragged
    finished: Tensor
    prompt_ids: tuple[str, ...]
    samples: Tensor
    group: Tensor
    truths: tuple[Any, ...]
    messages: tuple[tuple[dict[str, str], ...], ...]
    texts: tuple[str, ...]
    weights_version: Tensor
    old_logp: Ragged | None = None
    ref_logp: Ragged | None = None
    value: Ragged | None = None
    score: Scores | None = None
    token_reward: Ragged | None = None
    advantage: Ragged | None = None
    ret: Ragged | None = None
    counted: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def item_tokens(self) -> Tensor:
        """(B,) tokens that one item costs an engine."""
        return self.sequences.tokens.lens

    def column(self, name: str) -> Ragged:
        """An optional ragged column that this point of the flow needs."""
        value = getattr(self, name)
        if value is None:
            raise ShapeError(f"the rollout has no {name} yet", fix=f"add it with rollout.adding({name}=...) first")
        return value


@dataclass(frozen=True, eq=False)
class Demonstrations(_Columns):
    """B supervised sequences; `sequences.trained` marks the tokens whose logprob is maximised."""

    sequences: Sequences
    ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sequences)

    def item_tokens(self) -> Tensor:
        return self.sequences.tokens.lens


@dataclass(frozen=True, eq=False)
class Pairs(_Columns):
    """P preference pairs. Chosen and rejected share a prompt; a pair is one item and is never cut.

    margin (P,): how much better chosen is, in units of the score; 0 where the data does not say.
    ref_chosen_logp, ref_rejected_logp  Ragged over the response tokens of P rows each: the reference's logprobs.
    """

    chosen: Sequences
    rejected: Sequences
    margin: Tensor
    ids: tuple[str, ...]
    ref_chosen_logp: Ragged | None = None
    ref_rejected_logp: Ragged | None = None

    def adding(self, **columns: Any) -> Self:
        """A copy with these columns set; `ref_logp`, 2P rows as a role returns for `sequences`, sets those of both
        sides.  An unknown name raises TypeError, another number of rows ShapeError.
        """
        if "ref_logp" in columns:
            columns["ref_chosen_logp"], columns["ref_rejected_logp"] = self.sides(columns.pop("ref_logp"))
        return super().adding(**columns)

    def sides(self, column: Ragged) -> tuple[Ragged, Ragged]:
        """A column over the response tokens of `sequences`, cut into chosen and rejected.  Raises ShapeError."""
        if not torch.equal(column.lens, self.sequences.response_lens):
            raise ShapeError(
                f"a column of {len(column)} rows and {column.flat.shape[0]} tokens does not fit {len(self)} pairs",
                fix="give all chosen rows, then all rejected ones, one entry a response token",
            )
        cut = int(self.chosen.response_lens.sum())
        lens = column.lens
        return Ragged(column.flat[:cut], lens[: len(self)]), Ragged(column.flat[cut:], lens[len(self) :])

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def sequences(self) -> Sequences:
        """(2P) sequences: all chosen, then all rejected."""
        return Sequences.concat([self.chosen, self.rejected])

    def item_tokens(self) -> Tensor:
        return self.chosen.tokens.lens + self.rejected.tokens.lens


@dataclass(frozen=True)
class Stat:
    """A metric as a sum and the weight it is divided by, so that it aggregates exactly over micro-batches and ranks."""

    total: float
    weight: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Stat:
        """Sum and count of the entries whose mask is set (all without a mask); values under mask 0 are never read."""
        values = values.detach().double()
        if mask is None:
            return cls(float(values.sum()), float(values.numel()))
        return cls(float(values[mask.bool()].sum()), float(mask.sum()))

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else float("nan")

    def plus(self, other: Stat) -> Stat:
        return Stat(self.total + other.total, self.weight + other.weight)


Stats = dict[str, Stat]


def merge_stats(parts: Sequence[Stats]) -> Stats:
    """Sums of sums: the order and the cut of the parts do not matter."""
    out: Stats = {}
    for part in parts:
        for name, stat in part.items():
            out[name] = out[name].plus(stat) if name in out else stat
    return out


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model computed for some items; an engine fills what a loss asks for.

    logp, entropy  (R,) over response tokens.   value (R,) before each response token.
    score (sequences,) one scalar per sequence, read at its last real token.
    """

    logp: Tensor | None = None
    entropy: Tensor | None = None
    value: Tensor | None = None
    score: Tensor | None = None
