"""What flows through an algorithm: prompts, rollouts, demonstrations, preference pairs.

Shapes: B sequences, T response tokens, P prompts or pairs, K named scores, C candidate tokens, R flat response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from tutelage.errors import ShapeError
from tutelage.types.ragged import Ragged, Sequences


@dataclass(frozen=True, eq=False)
class Prompts:
    """P prompts to be answered: token ids, an id that keys the randomness, and what a reward rule may need.

    ids        stable names of the prompts (the same in every run and at every batch size).
    truths     ground truth per prompt for rule rewards, or None.
    messages   the chat behind each prompt, a tuple of {"role", "content"}; for reward models with another template.
    step, n    the training step and samples per prompt; they key the randomness.
    greedy     evaluation only: take the most likely token.
    environments  name of the environment that each prompt begins an episode of; None: prompts are answered in one turn.
    """

    tokens: tuple[tuple[int, ...], ...]
    ids: tuple[str, ...]
    truths: tuple[Any, ...]
    messages: tuple[tuple[dict[str, str], ...], ...]
    step: int = 0
    n: int = 1
    purpose: str = "rollout"
    greedy: bool = False
    environments: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def adding(self, **columns: Any) -> Prompts:
        """A copy with these set, such as greedy=True, n=1; an unknown name raises TypeError."""
        return replace(self, **columns)

    def select(self, index: Sequence[int]) -> Prompts:
        pick = list(index)
        return replace(
            self,
            tokens=tuple(self.tokens[i] for i in pick),
            ids=tuple(self.ids[i] for i in pick),
            truths=tuple(self.truths[i] for i in pick),
            messages=tuple(self.messages[i] for i in pick),
            environments=None if self.environments is None else tuple(self.environments[i] for i in pick),
        )


def _select(value: Any, index_B: Tensor) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value[index_B]
    if isinstance(value, tuple):
        return tuple(value[i] for i in index_B.tolist())
    return value.select(index_B)


def _concat(name: str, values: list[Any]) -> Any:
    first = values[0]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise ShapeError(f"some of the parts have no {name}", fix="set the column in all of them, or in none")
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
        columns = {n: [getattr(part, n) for part in parts] for n in names}
        return cls(**{n: found[0] if n in cls._whole else _concat(n, found) for n, found in columns.items()})


@dataclass(frozen=True, eq=False)
class Scores(_Columns):
    """What the reward sources said: values (B, K) in their own units, their weighted sum total (B,), and K names.

    weights  (K,) of the sum, so that an algorithm can treat the sources apart.
    errors   one entry per row: what went wrong while it was scored, "" where nothing did; None: nothing anywhere.  The
             values of a failed row mean nothing: an algorithm leaves the row out (`valid`).
    """

    values: Tensor
    total: Tensor
    names: tuple[str, ...]
    weights: tuple[float, ...] = ()
    errors: tuple[str, ...] | None = None

    _whole = ("names", "weights")

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        if any(part.errors is not None for part in parts):
            parts = [part if part.errors is not None else part.adding(errors=("",) * len(part.total)) for part in parts]
        return super().concat(parts)

    @property
    def valid(self) -> Tensor:
        """(B,) bool: rows that have a score."""
        if self.errors is None:
            return torch.ones_like(self.total, dtype=torch.bool)
        return torch.tensor([not error for error in self.errors], dtype=torch.bool)


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
    baseline      scores of one greedy response to each prompt; row `group[b]` of it belongs to sequence b.
    log_collision Ragged (R): log sum_v p_v^2 of the distribution each token was drawn from.
    teacher_logp  Ragged (R): a teacher's logprobs of the response tokens.
    candidate_ids, candidate_logp  Ragged (R, C): a teacher's likeliest tokens at each position, and their logprobs.

    Of episodes with an environment, else None.  What the environment said is in the response and not trained:
    environments  its name.    turns (B,) int64: responses of the policy in the row.
    transcripts   every message after the prompt; `texts` holds the same as the tokens spell it.
    episode_info  sums over the turns of the numbers it told.
    episode_errors  what went wrong in it, "" where nothing did.  Nothing in such a row is trained or rewarded.
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
    baseline: Scores | None = None
    log_collision: Ragged | None = None
    teacher_logp: Ragged | None = None
    candidate_ids: Ragged | None = None
    candidate_logp: Ragged | None = None
    environments: tuple[str, ...] | None = None
    turns: Tensor | None = None
    transcripts: tuple[tuple[dict[str, str], ...], ...] | None = None
    episode_info: tuple[dict[str, float], ...] | None = None
    episode_errors: tuple[str, ...] | None = None

    _whole = ("baseline",)

    def __len__(self) -> int:
        return len(self.sequences)

    def item_tokens(self) -> Tensor:
        """(B,) tokens that one item costs an engine."""
        return self.sequences.tokens.lens

    def rewarded(self) -> Tensor:
        """(B,) float32: what each response is paid, its score and the rewards of its trained tokens together."""
        lens = self.sequences.response_lens
        total = torch.zeros(len(self)) if self.score is None else self.score.total.float()
        if self.token_reward is None:
            return total
        paid = torch.where(self.sequences.trained.flat, self.token_reward.flat, 0.0)
        rows = torch.repeat_interleave(torch.arange(len(self)), lens)
        return total + torch.zeros(len(self), dtype=torch.float64).index_add_(0, rows, paid.double()).float()

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
        return two_sides(column, self.sequences, "chosen rows, then all rejected ones")

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def sequences(self) -> Sequences:
        """(2P) sequences: all chosen, then all rejected."""
        return Sequences.concat([self.chosen, self.rejected])

    def item_tokens(self) -> Tensor:
        return self.chosen.tokens.lens + self.rejected.tokens.lens


@dataclass(frozen=True, eq=False)
class Unpaired(_Columns):
    """B answers, each desirable or not, and to each prompt an answer that was given to another one.

    answers, mismatched  B sequences each; row b of `mismatched` has the prompt of row b and another row's answer: from
                         these KTO estimates the KL.  An answer and its mismatched row are one item, never cut.
    desirable (B,) bool.
    ref_answer_logp, ref_mismatched_logp  Ragged over the response tokens of B rows each: the reference's logprobs.
    """

    answers: Sequences
    mismatched: Sequences
    desirable: Tensor
    ids: tuple[str, ...]
    ref_answer_logp: Ragged | None = None
    ref_mismatched_logp: Ragged | None = None

    def adding(self, **columns: Any) -> Self:
        """A copy with these columns set; `ref_logp`, 2B rows as a role returns for `sequences`, sets those of both
        sides.  An unknown name raises TypeError, another number of rows ShapeError.
        """
        if "ref_logp" in columns:
            columns["ref_answer_logp"], columns["ref_mismatched_logp"] = self.sides(columns.pop("ref_logp"))
        return super().adding(**columns)

    def sides(self, column: Ragged) -> tuple[Ragged, Ragged]:
        """A column over the response tokens of `sequences`, cut into answers and mismatched.  Raises ShapeError."""
        return two_sides(column, self.sequences, "answers, then all mismatched ones")

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def sequences(self) -> Sequences:
        """(2B) sequences: all answers, then all mismatched ones."""
        return Sequences.concat([self.answers, self.mismatched])

    def item_tokens(self) -> Tensor:
        return self.answers.tokens.lens + self.mismatched.tokens.lens


def two_sides(column: Ragged, sequences: Sequences, order: str) -> tuple[Ragged, Ragged]:
    """A column over the response tokens of 2N sequences, cut in the middle.  Raises ShapeError."""
    half = len(sequences) // 2
    if not torch.equal(column.lens, sequences.response_lens):
        raise ShapeError(
            f"a column of {len(column)} rows and {column.flat.shape[0]} tokens does not fit {half} items",
            fix=f"give all {order}, one entry a response token",
        )
    cut = int(column.lens[:half].sum())
    return Ragged(column.flat[:cut], column.lens[:half]), Ragged(column.flat[cut:], column.lens[half:])
