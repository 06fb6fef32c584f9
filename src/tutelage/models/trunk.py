"""The transformer below any head, run over sequences of different length without padding between them.

Shapes: B sequences, S tokens of the longest, N flat tokens, M of a row that shares prompts, n of one rank, H hidden,
R positions, r of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from tutelage.errors import ModelError, ShapeError
from tutelage.models.fused import fuse
from tutelage.models.parallel.tokens import TokenCut, TokenParallel, sequence_obstacle
from tutelage.models.paths import max_positions, position_offset
from tutelage.models.prefix import SharedRow, attention_alone, shared_row
from tutelage.models.recompute import Recompute
from tutelage.types import Ragged, Sequences, valid_mask

Layout = Literal["packed", "padded"]


@dataclass(eq=False)
class Trunk:
    """model: a transformers backbone, without head.

    layout  packed: one row of segments, through the "tutelage" attention.  padded: right-padded rows and an attention
            mask, through the model's own attention, for architectures whose layers mix tokens in other ways.
    causal  whether a token sees only what is before it.
    tokens  the ranks that every packed row is cut over; None: this one computes the whole row.
    recompute  which blocks a training pass recomputes, by budget; None: as the blocks themselves are set.

    The model's elementwise parts are fused (`fused.fuse`).

    Raises ModelError for token-parallel ranks with the padded layout, or that do not divide the attention heads.
    """

    model: PreTrainedModel
    layout: Layout = "packed"
    causal: bool = True
    tokens: TokenParallel | None = None
    recompute: Recompute | None = None

    def __post_init__(self) -> None:
        fuse(self.model)
        if self.tokens is None:
            return
        name = type(self.model).__name__
        if self.layout == "padded":
            raise ModelError(
                f"{name} cannot be packed, so its rows cannot be cut over {self.tokens.size} token-parallel ranks",
                fix="set context and sequence to 1 for this model: its layers mix tokens outside attention",
            )
        obstacle = sequence_obstacle(self.model.config, self.tokens.sequences)
        if obstacle is not None:
            raise ModelError(f"{name} has {obstacle}", fix="change the sequence axis, or use context instead")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def shares_prompts(self) -> bool:
        """Whether sequences may share the states of a common prompt, exactly: all that tokens meet in is causal
        attention, over a row that this rank computes whole."""
        whole = self.layout == "packed" and self.causal and self.tokens is None
        return whole and attention_alone(self.model.config)

    @property
    def hidden_size(self) -> int:
        return embedding_matrix(self.model).shape[1]

    def hidden(self, tokens: Ragged) -> Tensor:
        """(N, H): the last hidden state of every token, in the order of `tokens.flat`; on ranks, on every one of them.

        Raises ShapeError for an empty sequence, ModelError for one that is longer than the model's context.
        """
        states = self.states(tokens)
        if states.cut is None:
            return states.hidden
        return states.read(torch.arange(tokens.flat.shape[0]), lambda hidden_rH, _: hidden_rH)

    def states(self, tokens: Ragged) -> States:
        """The last hidden states of the tokens that this rank computes. Raises as `hidden`."""
        self.check(tokens)
        tokens = tokens.to(self.device)
        if self.tokens is not None:
            cut = self.tokens.cut(tokens)
            return States(cut_hidden(self.model, tokens, cut), cut)
        if self.layout == "packed":
            with self._recomputing(tokens.flat.shape[0]):
                return States(packed_hidden(self.model, tokens))
        with self._recomputing(len(tokens) * int(tokens.lens.max())):
            return States(padded_hidden(self.model, tokens))

    def shared_states(self, sequences: Sequences) -> States:
        """As `states`, read at the same positions; a prompt that several sequences have is computed once.

        The same as `states` where there is none, and where none may be shared (`shares_prompts`).
        """
        self.check(sequences.tokens)
        row = shared_row(sequences) if self.shares_prompts else None
        if row is None:
            return self.states(sequences.tokens)
        row = row.to(self.device)
        with self._recomputing(row.flat.shape[0]):
            return States(shared_hidden(self.model, row), index=row.index)

    def _recomputing(self, tokens: int) -> AbstractContextManager[None]:
        """Around a forward pass of so many tokens."""
        trains = self.model.training and torch.is_grad_enabled()
        return nullcontext() if self.recompute is None or not trains else self.recompute.during(tokens)

    def check(self, tokens: Ragged) -> None:
        if len(tokens) == 0 or int(tokens.lens.min()) == 0:
            raise ShapeError(
                "there is no sequence" if len(tokens) == 0 else f"sequence {int(tokens.lens.argmin())} has no tokens",
                fix="give every sequence at least one token",
            )
        limit = max_positions(self.model.config)
        longest = int(tokens.lens.max())
        if limit is not None and longest > limit:
            raise ModelError(
                f"sequence {int(tokens.lens.argmax())} has {longest} tokens, the model's context is {limit}",
                fix="lower data.max_prompt_tokens and the response length, or use a model with a longer context",
            )


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states (N, H) of a row; where it is cut over ranks, (n, H) of the tokens here.

    index  (N,) where the state of each of N tokens is among fewer, (M, H), that share prompts; None: they are in order.

    What is read comes back whole on every rank, with gradient to wherever the states are.  Only results travel between
    ranks, never hidden states of single tokens, unless these are the result.
    """

    hidden: Tensor
    cut: TokenCut | None = None
    index: Tensor | None = None

    def read(self, index_R: Tensor, function: Callable[[Tensor, Tensor | slice], Tensor]) -> Tensor:
        """(R, ...): function(hidden_rH, pick) at the positions `index_R` of the row.

        function: called once, with the states of those positions that are here and with which of the R they are (`pick`
        indexes what belongs to them); returns (r, ...).
        """
        if self.cut is None:
            return function(self._at(index_R), slice(None))
        place_r, pick_r = self.cut.local(index_R)
        found = function(self.hidden[place_r], pick_r)
        whole = found.new_zeros((index_R.shape[0], *found.shape[1:])).index_add(0, pick_r, found)
        return self.cut.parallel.total(whole)

    def sums(self, index_R: Tensor, rows_R: Tensor, count: int) -> Tensor:
        """(count, H) in float32: the states at positions `index_R`, added up by the row that each belongs to."""
        rows_R = rows_R.to(self.hidden.device)
        if self.cut is None:
            wide_RH = self._at(index_R).float()
            return wide_RH.new_zeros(count, wide_RH.shape[1]).index_add(0, rows_R, wide_RH)
        place_r, pick_r = self.cut.local(index_R)
        wide_rH = self.hidden[place_r].float()
        part = wide_rH.new_zeros(count, wide_rH.shape[1]).index_add(0, rows_R[pick_r], wide_rH)
        return self.cut.parallel.total(part)

    def _at(self, index_R: Tensor) -> Tensor:
        """(R, H) the states at these positions of the row, of which several may be one.

        The backward pass of an embedding adds what comes from equal positions in a fixed order, in float32 at least on
        CUDA; that of indexing adds in the order of the threads.
        """
        index_R = index_R.to(self.hidden.device)
        return embedding(index_R if self.index is None else self.index[index_R], self.hidden)


def embedding_matrix(model: PreTrainedModel) -> Tensor:
    """(V, H): the input embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def _no_cache(model: PreTrainedModel) -> dict[str, Any]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


def packed_hidden(model: PreTrainedModel, tokens: Ragged) -> Tensor:
    """(N, H) in one (1, N) pass: positions start again in every segment, attention stays inside it."""
    out = model(
        input_ids=tokens.flat[None],
        position_ids=_positions(model, tokens)[None],
        cu_seq_lens_q=tokens.offsets().to(torch.int32),
        **_no_cache(model),
    )
    return out.last_hidden_state[0]


def shared_hidden(model: PreTrainedModel, row: SharedRow) -> Tensor:
    """(M, H): as `packed_hidden`, of the tokens of a row that shares prompts; token t of N is at `row.index[t]`."""
    out = model(
        input_ids=row.flat[None],
        position_ids=row.positions[None] + position_offset(model.config),
        shared_prompts=row.segments,
        **_no_cache(model),
    )
    return out.last_hidden_state[0]


def cut_hidden(model: PreTrainedModel, tokens: Ragged, cut: TokenCut) -> Tensor:
    """(n, H): as `packed_hidden`, of this rank's tokens; all peers must call it together."""
    out = model(
        input_ids=cut.take(tokens.flat, 0)[None],
        position_ids=cut.take(_positions(model, tokens), position_offset(model.config))[None],
        token_cut=cut,
        **_no_cache(model),
    )
    return out.last_hidden_state[0]


def _positions(model: PreTrainedModel, tokens: Ragged) -> Tensor:
    """(N,) from the architecture's first position id, again in every segment."""
    offsets = tokens.offsets()
    position_N = torch.arange(tokens.flat.shape[0], device=offsets.device)
    return position_N - torch.repeat_interleave(offsets[:-1], tokens.lens) + position_offset(model.config)


def padded_hidden(model: PreTrainedModel, tokens: Ragged) -> Tensor:
    """(N, H) from right-padded rows (B, S) with an attention mask; what stands in the padding has no influence."""
    pad = getattr(model.config, "pad_token_id", None)
    mask_BS = valid_mask(tokens.lens, int(tokens.lens.max()))
    out = model(input_ids=tokens.padded(pad or 0), attention_mask=mask_BS.to(torch.int64), **_no_cache(model))
    return out.last_hidden_state[mask_BS]


def one_by_one_hidden(model: PreTrainedModel, tokens: Ragged) -> Tensor:
    """(N, H) as transformers itself computes it: every sequence alone, without positions, mask or cache."""
    return torch.cat([model(input_ids=row[None], **_no_cache(model)).last_hidden_state[0] for row in tokens.rows()])
