"""The transformer below any head, run over sequences of different length without padding between them.

Shapes: B sequences, S tokens of the longest, N flat tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tutelage.errors import ModelError, ShapeError
from tutelage.models.paths import max_positions, position_offset
from tutelage.types import Ragged, valid_mask

Layout = Literal["packed", "padded"]


@dataclass(eq=False)
class Trunk:
    """model: a transformers backbone, without head.

    layout  packed: one row of segments, through the "tutelage" attention.  padded: right-padded rows and an attention
            mask, through the model's own attention, for architectures whose layers mix tokens in other ways.
    causal  whether a token sees only what is before it.
    """

    model: PreTrainedModel
    layout: Layout = "packed"
    causal: bool = True

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def hidden_size(self) -> int:
        return embedding_matrix(self.model).shape[1]

    def hidden(self, tokens: Ragged) -> Tensor:
        """(N, H): the last hidden state of every token, in the order of `tokens.flat`.

        Raises ShapeError for an empty sequence, ModelError for one that is longer than the model's context.
        """
        self._check(tokens)
        tokens = tokens.to(self.device)
        return packed_hidden(self.model, tokens) if self.layout == "packed" else padded_hidden(self.model, tokens)

    def _check(self, tokens: Ragged) -> None:
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


def embedding_matrix(model: PreTrainedModel) -> Tensor:
    """(V, H): the input embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def _no_cache(model: PreTrainedModel) -> dict[str, Any]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


def packed_hidden(model: PreTrainedModel, tokens: Ragged) -> Tensor:
    """(N, H) in one (1, N) pass: positions start again in every segment, attention stays inside it."""
    offsets = tokens.offsets()
    position = torch.arange(tokens.flat.shape[0], device=offsets.device)
    position = position - torch.repeat_interleave(offsets[:-1], tokens.lens) + position_offset(model.config)
    out = model(
        input_ids=tokens.flat[None],
        position_ids=position[None],
        cu_seq_lens_q=offsets.to(torch.int32),
        **_no_cache(model),
    )
    return out.last_hidden_state[0]


def padded_hidden(model: PreTrainedModel, tokens: Ragged) -> Tensor:
    """(N, H) from right-padded rows (B, S) with an attention mask; what stands in the padding has no influence."""
    pad = getattr(model.config, "pad_token_id", None)
    mask_BS = valid_mask(tokens.lens, int(tokens.lens.max()))
    out = model(input_ids=tokens.padded(pad or 0), attention_mask=mask_BS.to(torch.int64), **_no_cache(model))
    return out.last_hidden_state[mask_BS]


def one_by_one_hidden(model: PreTrainedModel, tokens: Ragged) -> Tensor:
    """(N, H) as transformers itself computes it: every sequence alone, without positions, mask or cache."""
    return torch.cat([model(input_ids=row[None], **_no_cache(model)).last_hidden_state[0] for row in tokens.rows()])
