"""What a model says about sequences: logprobs, values and scores, of response positions only, without padding.

Shapes: B sequences, N flat tokens, R flat response tokens, r of one rank, H hidden, C candidate tokens.

The hidden state of token t - 1 predicts token t, so everything about response token t is read at t - 1: its logprob,
and the value of the state in which it was chosen.  A reward model's score of token t has read the token, and is read at
t.  Gradients are recorded unless the caller switches them off.

Sequences with one prompt share its states where that changes nothing (`shares_prompts`): several responses then read
the state of its last token.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import ModelError, ShapeError
from tutelage.math.logprobs import LOGPROB_ALONE, Asked, head_outputs
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel
from tutelage.models.trunk import States
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


def shares_prompts(model: Model) -> bool:
    """Whether sequences with one prompt share its states.

    Not where several ranks compute one row, whole or stage by stage, and not where pooled states are remembered.
    """
    remembered = isinstance(model, ScalarModel) and model.features is not None
    return model.trunk.shares_prompts and not in_stages(model) and not remembered


def in_stages(model: Model) -> bool:
    """Whether the blocks are cut into pipeline stages."""
    return model.sharding is not None and model.sharding.stages is not None


def hidden_states(model: Model, sequences: Sequences, share: bool = True) -> States:
    """The last hidden states, read at positions of `sequences.tokens`.  share False: prompts are computed each time."""
    if share and shares_prompts(model):
        return model.trunk.shared_states(sequences)
    return model.trunk.states(sequences.tokens)


def token_outputs(
    model: LanguageModel,
    sequences: Sequences,
    asked: Asked = LOGPROB_ALONE,
    temperature: float = 1.0,
    share: bool = True,
) -> dict[str, Tensor]:
    """As `math.logprobs.distribution_outputs`: of the distribution that each of the R response tokens was drawn from.

    softmax(logits / temperature), in nats; only response positions go through the output layer, in chunks.
    """
    index_R = predicting_index(sequences)
    return _distribution(model, sequences, hidden_states(model, sequences, share), index_R, asked, temperature)


def _distribution(
    model: LanguageModel, sequences: Sequences, states: States, index_R: Tensor, asked: Asked, temperature: float
) -> dict[str, Tensor]:
    """As `token_outputs`, from the states; index_R: of the predicting positions."""
    home = states.hidden.device
    targets_R = sequences.tokens.flat[index_R + 1].to(home)
    candidates_RC = None if asked.candidates is None else asked.candidates.to(home)
    columns: dict[str, tuple[slice, bool]] = {}
    # several micro-batches of a pipeline wait for their backward passes at once
    plain_head = functools.partial(head_outputs, keep_logits=not in_stages(model))

    def read(hidden_rH: Tensor, pick: Tensor | slice) -> Tensor:
        """(r, columns): what is read travels as one tensor.  Ids are exact in float32 below 2^24."""
        here = replace(asked, candidates=None if candidates_RC is None else candidates_RC[pick])
        output = plain_head if model.vocabulary is None else model.vocabulary.outputs
        found = output(hidden_rH, targets_R[pick], model.logits, here, temperature=temperature)
        parts, start = [], 0
        for name, x in found.items():
            part_rC = (x if x.ndim == 2 else x[:, None]).to(found["logp"].dtype)
            columns[name] = (slice(start, start + part_rC.shape[1]), x.ndim == 2)
            parts.append(part_rC)
            start += part_rC.shape[1]
        return torch.cat(parts, dim=1)

    whole_R = states.read(index_R, read)
    found = {name: whole_R[:, at] if wide else whole_R[:, at.start] for name, (at, wide) in columns.items()}
    if "top_ids" in found:
        found["top_ids"] = found["top_ids"].to(torch.int64)
    return found


def token_logprobs(
    model: LanguageModel, sequences: Sequences, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(R,) logprob of each response token, and the entropy (R,) of the distribution it was drawn from, in nats."""
    found = token_outputs(model, sequences, Asked(entropy=with_entropy), temperature)
    return found["logp"], found.get("entropy")


def values_with_bootstrap(model: ScalarModel, sequences: Sequences, share: bool = True) -> Ragged:
    """Ragged (R + B): V before each response token, and V after the last one; rows one longer than the responses."""
    return Ragged(_token_scalars(model, sequences, _bootstrap_index(sequences), share), sequences.response_lens + 1)


def _bootstrap_index(sequences: Sequences) -> Tensor:
    """(R + B,) flat positions: the token before each response token, and the last one of each sequence."""
    read = torch.zeros_like(sequences.tokens.flat, dtype=torch.bool)
    read[predicting_index(sequences)] = True
    read[sequences.tokens.offsets()[1:] - 1] = True
    return torch.nonzero(read).squeeze(1)


def logprobs_and_values(
    model: LanguageModel, sequences: Sequences, temperature: float = 1.0, share: bool = True
) -> tuple[Tensor, Ragged]:
    """(R,) logprobs, and the values as `values_with_bootstrap`, of a policy with a value head: one pass of the trunk.

    Raises ModelError for a policy without one.
    """
    require_computed(model, ("logp", "value"))
    index_R = predicting_index(sequences)
    states = hidden_states(model, sequences, share)
    logp_R = _distribution(model, sequences, states, index_R, LOGPROB_ALONE, temperature)["logp"]
    return logp_R, Ragged(_head_values(model, states, _bootstrap_index(sequences)), sequences.response_lens + 1)


def _head_values(model: LanguageModel, states: States, index_R: Tensor) -> Tensor:
    """(R,) the policy's value head on the hidden states at these positions."""
    return states.read(index_R, lambda hidden_rH, _: model.values(hidden_rH))


def token_values(model: ScalarModel, sequences: Sequences, share: bool = True) -> Tensor:
    """(R,) V before each response token."""
    return _token_scalars(model, sequences, predicting_index(sequences), share)


def _token_scalars(model: ScalarModel, sequences: Sequences, index_R: Tensor, share: bool) -> Tensor:
    """(R,) the head on the hidden states at these positions."""
    return hidden_states(model, sequences, share).read(index_R, lambda hidden_rH, _: model.scalars(hidden_rH))


def token_scores(model: ScalarModel, sequences: Sequences, share: bool = True) -> Tensor:
    """(R,) a reward model's scalar at each response token, with the token itself read; no pooling."""
    return _token_scalars(model, sequences, sequences.response_index(), share)


def sequence_scores(model: ScalarModel, sequences: Sequences, share: bool = True) -> Tensor:
    """(B,) the head on each sequence's pooled hidden state."""
    if model.features is not None:
        return model.scores(sequences.tokens, sequences.prompt_lens)
    return model.scalars(_pooled(model, hidden_states(model, sequences, share), sequences))


def _pooled(model: ScalarModel, states: States, sequences: Sequences) -> Tensor:
    """(B, H)"""
    home = states.hidden.device
    return model.pooled(states, sequences.tokens.lens.to(home), sequences.prompt_lens.to(home))


COMPUTED = {
    "language": frozenset({"logp", "entropy", "log_collision", "candidate_logp"}),
    "value": frozenset({"value"}),
    "reward": frozenset({"score", "token_score"}),
}
"""What a kind of model can be asked for; a language model with a value head, for both of its kinds."""


def require_computed(model: Model, wanted: Collection[str]) -> None:
    """Raises ModelError for what this model does not compute."""
    can = COMPUTED["language" if isinstance(model, LanguageModel) else model.kind]
    if isinstance(model, LanguageModel) and model.value_head is not None:
        can = can | COMPUTED["value"]
    unknown = sorted(set(wanted) - can)
    if unknown:
        raise ModelError(
            f"the loss needs {', '.join(unknown)}, this model computes {', '.join(sorted(can))}",
            fix="give the loss to the role it is meant for",
        )


def candidates_of(batch: Any, wanted: Collection[str]) -> Tensor | None:
    """(R, C) the batch's candidate tokens, where their logprobs are wanted.

    Raises ShapeError for a batch that has none, or not one row for each response token.
    """
    if "candidate_logp" not in wanted:
        return None
    ids = getattr(batch, "candidate_ids", None)
    if ids is None:
        raise ShapeError("the batch has no candidate_ids", fix="add them with adding(candidate_ids=...) first")
    if ids.flat.ndim != 2 or not torch.equal(ids.lens, batch.sequences.response_lens):
        raise ShapeError(
            f"candidate_ids {tuple(ids.flat.shape)} do not fit {int(batch.sequences.response_lens.sum())} response "
            "tokens",
            fix="give the same number of candidates for every response token",
        )
    flat: Tensor = ids.flat
    return flat


def outputs(
    model: Model,
    sequences: Sequences,
    wanted: Collection[str],
    temperature: float,
    candidates: Tensor | None = None,
    share: bool = True,
) -> Outputs:
    """What a loss asks for, on the device of `sequences`.

    candidates  (R, C) token ids, for "candidate_logp" (`candidates_of`).
    share       as `hidden_states`.
    Raises ModelError for what this model does not compute.
    """
    require_computed(model, wanted)
    if isinstance(model, LanguageModel):
        found = _language_outputs(model, sequences, wanted, temperature, candidates, share)
    elif model.kind == "value":
        found = {"value": token_values(model, sequences, share)}
    else:
        found = _reward_outputs(model, sequences, wanted, share)
    home = sequences.tokens.flat.device
    return Outputs(**{name: x.to(home) for name, x in found.items()})


def _language_outputs(
    model: LanguageModel,
    sequences: Sequences,
    wanted: Collection[str],
    temperature: float,
    candidates: Tensor | None,
    share: bool,
) -> dict[str, Tensor]:
    """Distributions, and the values of a model with a value head, from one pass through the trunk."""
    asked = Asked("entropy" in wanted, "log_collision" in wanted, candidates)
    if "value" not in wanted:
        return token_outputs(model, sequences, asked, temperature, share)
    index_R = predicting_index(sequences)
    states = hidden_states(model, sequences, share)
    values = {"value": _head_values(model, states, index_R)}
    if set(wanted) == {"value"}:
        return values
    return _distribution(model, sequences, states, index_R, asked, temperature) | values


def _reward_outputs(
    model: ScalarModel, sequences: Sequences, wanted: Collection[str], share: bool
) -> dict[str, Tensor]:
    """Both kinds of score from one pass through the trunk, but where pooled states are remembered."""
    if "token_score" not in wanted:
        return {"score": sequence_scores(model, sequences, share)}
    if "score" not in wanted:
        return {"token_score": token_scores(model, sequences, share)}
    if model.features is not None:
        return {"score": sequence_scores(model, sequences), "token_score": token_scores(model, sequences, share)}
    states = hidden_states(model, sequences, share)
    per_token = states.read(sequences.response_index(), lambda hidden_rH, _: model.scalars(hidden_rH))
    return {"score": model.scalars(_pooled(model, states, sequences)), "token_score": per_token}
