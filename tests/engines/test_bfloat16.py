"""Logprobs and one update's gradient in bfloat16 against float32.

bfloat16 rounds with u = 2^-9.  A block of a decoder rounds its results and what it adds to the residual stream a few
times, each time by at most u relative; errors of different blocks are independent, so the relative error of the last
hidden states grows like u sqrt(L) over L blocks, and that of the logits, centred over the vocabulary, with it.  The
bounds are C u sqrt(L), C = 6, times the RMS of the centred logits for logprobs, and 3 times that factor for gradients,
whose backward pass rounds as often again on top of the forward pass.
"""

from __future__ import annotations

import math
from pathlib import Path

import engine_kit as kit
import pytest
import torch

from tutelage.engines.engine import ModelEngine
from tutelage.types import Demonstrations, Sequences

UNIT = 2.0**-9
C = 6


def centred_rms(engine: ModelEngine, sequences: Sequences) -> float:
    """Of the logits at all tokens."""
    with torch.no_grad():
        logits = engine.model.logits(engine.model.trunk.hidden(sequences.tokens)).float()
    return float((logits - logits.mean(-1, keepdim=True)).square().mean().sqrt())


def require_accurate(folder: Path, batch: Demonstrations) -> None:
    wide, narrow = kit.policy_engine(folder), kit.policy_engine(folder, {"dtype": "bfloat16"})
    assert next(narrow.model.module.parameters()).dtype == torch.bfloat16
    factor = C * UNIT * math.sqrt(wide.model.model.config.num_hidden_layers)
    bound = factor * centred_rms(wide, batch.sequences)
    exact = wide.logprobs(batch.sequences, 1.0).flat
    apart = narrow.logprobs(batch.sequences, 1.0).flat - exact
    assert 0 < float(apart.square().mean().sqrt()) <= bound
    assert float(apart.abs().max()) <= 5 * bound
    assert abs(float(apart.mean())) <= bound / 2, "rounding has no direction"
    ours, theirs = narrow.gradients(batch, kit.TokenLoss()), wide.gradients(batch, kit.TokenLoss())
    assert ours.keys() == theirs.keys()
    error = math.sqrt(sum(float((ours[n] - theirs[n]).double().square().sum()) for n in theirs))
    size = math.sqrt(sum(float(theirs[n].double().square().sum()) for n in theirs))
    assert 0 < error <= 3 * factor * size
    assert all(g.dtype == torch.float32 for g in ours.values())


def test_a_tiny_model(tiny_llama_folder: Path) -> None:
    require_accurate(tiny_llama_folder, kit.batch())


@pytest.mark.slow
@pytest.mark.shared
def test_a_real_model(small_models: Path) -> None:
    lens = ((6, 10), (4, 8))
    made = kit.sequences(0, lens, 40000)
    require_accurate(small_models / "smollm2-135m-instruct", Demonstrations(made, ("a", "b")))
