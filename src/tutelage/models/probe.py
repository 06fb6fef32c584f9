"""A check at load time that packing changes nothing: packed against one by one, on random tokens.

So is a row in which two sequences share a prompt, where the model will run such rows.

A layer that mixes tokens outside attention (a convolution, a state space, a scan) or that ignores the positions it is
given leaks from one packed segment into the next without an error; the numbers are plausible and wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tutelage.errors import ModelError
from tutelage.models.attention import NAME, register
from tutelage.models.paths import max_positions
from tutelage.models.prefix import shared_row
from tutelage.models.trunk import (
    Trunk,
    embedding_matrix,
    one_by_one_hidden,
    packed_hidden,
    padded_hidden,
    shared_hidden,
)
from tutelage.types import Ragged, Sequences

TOLERANCE = 1e-4
"""Of the norm of the difference of a token's hidden states, relative to their norm; float32 rounding is about 1e-6."""


def choose_layout(model: PreTrainedModel) -> Trunk:
    """The trunk of a float32 backbone under the layout that gives its own numbers: packed, else padded with a warning.

    Leaves the model with the attention implementation that the layout needs. Raises ModelError where neither agrees.
    """
    register()
    tokens = _tokens(model)
    native = model.config._attn_implementation
    padded = ("eager",) if native == "eager" else ("sdpa", "eager")
    model.set_attn_implementation("eager")  # sdpa drops what it does not compute, such as Gemma 2's soft cap
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            expected = one_by_one_hidden(model, tokens)
            causal = _is_causal(model, tokens, expected)
            shared = _with_one_prompt(tokens)
            expected_shared = one_by_one_hidden(model, shared.tokens)
            model.set_attn_implementation(NAME)
            problem = _difference(packed_hidden, model, tokens, expected)
            if problem is None and Trunk(model, "packed", causal).shares_prompts:
                problem = _difference(lambda model, _: _shared(model, shared), model, shared.tokens, expected_shared)
            if problem is None:
                return Trunk(model, "packed", causal)
            worse: str | None = None
            for implementation in padded:
                model.set_attn_implementation(implementation)
                worse = _difference(padded_hidden, model, tokens, expected)
                if worse is None:
                    break
    finally:
        for module, training in modes.items():
            module.training = training
    name = type(model).__name__
    if worse is not None:
        raise ModelError(
            f"{name} computes other hidden states for a batch than for its sequences alone (packed: {problem}; "
            f"padded: {worse})",
            fix="use another architecture",
        )
    warnings.warn(
        f"{name} cannot be packed ({problem}); batches are right-padded with an attention mask, which is slower",
        stacklevel=2,
    )
    return Trunk(model, "padded", causal)


def require_head(model: PreTrainedModel, trunk: Trunk, head: Callable[[Tensor], Tensor]) -> None:
    """Raise ModelError unless `head(hidden)` gives the logits of `model`: an unknown scale or cap would not."""
    row = _tokens(model).rows()[0]
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    training = model.training
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=row[None]).logits[0]
        hidden = one_by_one_hidden(trunk.model, Ragged.from_rows([row]))
        error = _relative_error(head(hidden), expected)
    model.train(training)
    model.set_attn_implementation(implementation)
    if not error <= TOLERANCE:
        raise ModelError(
            f"the logits of {type(model).__name__} are not its output layer applied to its last hidden states "
            f"(relative difference {error:.2g})",
            fix="use an architecture with a plain, soft-capped or scaled output layer",
        )


def _tokens(model: PreTrainedModel) -> Ragged:
    """Three random rows; where a sliding window is short, one reaches beyond it."""
    lens = [7, 4, 11]
    window = getattr(model.config, "sliding_window", None)
    if isinstance(window, int) and 0 < window <= 64:
        lens[2] = max(lens[2], window + 5)
    limit = max_positions(model.config)
    lens = [min(n, limit) if limit else n for n in lens]
    vocabulary = embedding_matrix(model).shape[0]
    generator = torch.Generator().manual_seed(0)
    flat = torch.randint(0, vocabulary, (sum(lens),), generator=generator)
    pad = getattr(model.config, "pad_token_id", None)
    if pad is not None and vocabulary > 1:
        flat[flat == pad] = (pad + 1) % vocabulary
    return Ragged(flat, torch.tensor(lens)).to(next(model.parameters()).device)


def _with_one_prompt(tokens: Ragged) -> Sequences:
    """Two sequences as long as the longest row: its first tokens, and other last ones."""
    first, second = tokens.rows()[2].tolist(), tokens.rows()[1].tolist()
    last = min(3, len(first) - 1)
    sequences = Sequences.build([first[:-last]] * 2, [first[-last:], second[:last]])
    return sequences.to(tokens.flat.device)


def _shared(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    row = shared_row(sequences)
    if row is None:  # the model's context is too short for a prompt that is worth sharing
        return packed_hidden(model, sequences.tokens)
    row = row.to(sequences.tokens.flat.device)
    return shared_hidden(model, row)[row.index]


def _is_causal(model: PreTrainedModel, tokens: Ragged, expected: Tensor) -> bool:
    """Whether the first token's hidden state stays the same when the last token of its row changes."""
    row = tokens.rows()[0].clone()
    vocabulary = embedding_matrix(model).shape[0]
    row[-1] = (row[-1] + 1) % vocabulary
    changed = one_by_one_hidden(model, Ragged.from_rows([row]))
    return _relative_error(changed[:1], expected[:1]) <= 1e-6


def _difference(
    run: Callable[[PreTrainedModel, Ragged], Tensor], model: PreTrainedModel, tokens: Ragged, expected: Tensor
) -> str | None:
    try:
        error = _relative_error(run(model, tokens), expected)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
    return None if error <= TOLERANCE else f"hidden states differ by {error:.2g} of their norm"


def _relative_error(seen: Tensor, expected: Tensor) -> float:
    """The largest over tokens of |seen - expected| / |expected|; NaN anywhere gives infinity."""
    if seen.shape != expected.shape:
        return float("inf")
    error = (seen - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)
    return float(torch.nan_to_num(error, nan=float("inf")).max())
