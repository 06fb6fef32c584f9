"""What a model says about sequences: logprobs, values and scores, of response positions only, without padding.

Shapes: B sequences, N flat tokens, R flat response tokens, H hidden.

The hidden state of token t - 1 predicts token t, so everything about response token t is read at t - 1: its logprob,
and the value of the state in which it was chosen.  Gradients are recorded unless the caller switches them off.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from tutelage.errors import ModelError, ShapeError
from tutelage.math.logprobs import head_logprobs
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel
from tutelage.types import Outputs, Ragged, Sequences

Model = LanguageModel | ScalarModel


def predicting_index(sequences: Sequences) -> Tensor:
    """(R,) flat position of the token before each response token. Raises ShapeError for a response without a prompt."""
    bare = (sequences.prompt_lens == 0) & (sequences.response_lens > 0)
    if bool(bare.any()):
        raise ShapeError(
            f"sequence {int(bare.nonzero()[0])} has no prompt token, so nothing predicts its first response token",
            fix="begin every prompt with a BOS token, or put the first token of a text into its prompt",
        )
    return sequences.response_index() - 1


def token_logprobs(
    model: LanguageModel, sequences: Sequences, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(R,) logprob of each response token, and the entropy (R,) of the distribution it was drawn from, in nats.

    log softmax(logits / temperature); only response positions go through the output layer, in chunks.
    """
    index_R = predicting_index(sequences)
    states = model.trunk.states(sequences.tokens)
    targets_R = sequences.tokens.flat[index_R + 1].to(states.hidden.device)

    def read(hidden_rH: Tensor, pick: Tensor | slice) -> Tensor:
        """(r, 1 or 2)"""
        if model.vocabulary is None:
            found = head_logprobs(
                hidden_rH, targets_R[pick], model.logits, temperature=temperature, with_entropy=with_entropy
            )
        else:
            found = model.vocabulary.logprobs(
                hidden_rH, targets_R[pick], model.logits, temperature=temperature, with_entropy=with_entropy
            )
        return torch.stack([column for column in found if column is not None], dim=1)

    columns = states.read(index_R, read).unbind(1)
    return columns[0], columns[1] if with_entropy else None


def values_with_bootstrap(model: ScalarModel, sequences: Sequences) -> Ragged:
    """Ragged (R + B): V before each response token, and V after the last one; rows one longer than the responses."""
    keep = torch.ones_like(sequences.tokens.flat, dtype=torch.bool)
    keep[predicting_index(sequences)] = False
    ends_B = sequences.tokens.offsets()[1:] - 1
    keep[ends_B] = False
    index = torch.nonzero(~keep).squeeze(1)
    return Ragged(_token_scalars(model, sequences, index), sequences.response_lens + 1)


def token_values(model: ScalarModel, sequences: Sequences) -> Tensor:
    """(R,) V before each response token."""
    return _token_scalars(model, sequences, predicting_index(sequences))


def _token_scalars(model: ScalarModel, sequences: Sequences, index_R: Tensor) -> Tensor:
    """(R,) the head on the hidden states at these positions."""
    return model.trunk.states(sequences.tokens).read(index_R, lambda hidden_rH, _: model.scalars(hidden_rH))


def sequence_scores(model: ScalarModel, sequences: Sequences) -> Tensor:
    """(B,) the head on each sequence's pooled hidden state."""
    return model.scores(sequences.tokens, sequences.prompt_lens)


def outputs(model: Model, sequences: Sequences, wanted: Collection[str], temperature: float) -> Outputs:
    """What a loss asks for, on the device of `sequences`. Raises ModelError for what this model does not compute."""
    can = {"logp", "entropy"} if isinstance(model, LanguageModel) else {"value"} if model.kind == "value" else {"score"}
    unknown = sorted(set(wanted) - can)
    if unknown:
        raise ModelError(
            f"the loss needs {', '.join(unknown)}, this model computes {', '.join(sorted(can))}",
            fix="give the loss to the role it is meant for",
        )
    home = sequences.tokens.flat.device
    if isinstance(model, LanguageModel):
        logp_R, entropy_R = token_logprobs(model, sequences, temperature, "entropy" in wanted)
        return Outputs(logp=logp_R.to(home), entropy=None if entropy_R is None else entropy_R.to(home))
    if model.kind == "value":
        return Outputs(value=token_values(model, sequences).to(home))
    return Outputs(score=sequence_scores(model, sequences).to(home))
