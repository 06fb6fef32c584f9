"""Noise on embeddings: its law, its keys, and that only training sees it."""

from __future__ import annotations

from dataclasses import replace

import engine_kit as kit
import pytest
import torch

from tutelage.algorithms.sft import SFTLoss
from tutelage.errors import ConfigError
from tutelage.models.noise import neftune_noise

LENS, KEYS = torch.tensor([3, 1, 5]), torch.tensor([11, 12, 13])
NOISY = SFTLoss("token_mean", "nll", 5.0, seed=3, step=7)


def test_noise_is_within_alpha_over_the_root_of_length_times_width_and_fills_it():
    noise = neftune_noise(torch.tensor([400]), torch.tensor([5]), 5.0, 64)
    bound = 5.0 / (400 * 64) ** 0.5
    assert float(noise.abs().max()) <= bound
    assert float(noise.max()) > 0.99 * bound
    assert float(noise.min()) < -0.99 * bound
    assert float(noise.mean()) == pytest.approx(0.0, abs=4 * bound / 3**0.5 / (400 * 64) ** 0.5)
    assert float(noise.var()) == pytest.approx(bound**2 / 3, rel=0.03)


def test_the_scale_is_of_the_sequence_a_token_is_in():
    one, two = neftune_noise(torch.tensor([4]), KEYS[:1], 1.0, 8), neftune_noise(torch.tensor([16]), KEYS[:1], 1.0, 8)
    assert torch.allclose(one[:4], 2.0 * two[:4])


def test_the_noise_of_a_sequence_does_not_depend_on_its_company():
    together = neftune_noise(LENS, KEYS, 5.0, 8).split(LENS.tolist())
    for row in range(3):
        alone = neftune_noise(LENS[row : row + 1], KEYS[row : row + 1], 5.0, 8)
        assert torch.equal(together[row], alone)
    assert not torch.equal(together[0][0], together[0][1])


def test_noise_of_another_step_seed_or_row_differs():
    batch = kit.batch()
    keys = NOISY.noise_keys(batch)
    assert len(set(keys.tolist())) == len(batch)
    for other in (replace(NOISY, step=8), replace(NOISY, seed=4)):
        assert not set(keys.tolist()) & set(other.noise_keys(batch).tolist())


def test_a_scale_that_is_not_above_zero_is_refused():
    with pytest.raises(ConfigError, match="alpha"):
        neftune_noise(LENS, KEYS, 0.0, 4)


@pytest.mark.parametrize("budget", [12, 10_000])
def test_gradients_have_the_noise_whatever_the_micro_batches_and_evaluation_has_none(tiny_llama_folder, budget):
    batch, plain = kit.batch(), SFTLoss("token_mean")
    engine = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=budget)
    assert engine.evaluate(batch, NOISY)["loss"].mean == engine.evaluate(batch, plain)["loss"].mean
    noisy, other = engine.gradients(batch, NOISY), engine.gradients(batch, plain)
    whole = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=97).gradients(batch, NOISY)
    gap = {name: float((noisy[name] - other[name]).abs().max()) for name in noisy}
    assert max(gap.values()) > 1e-3
    assert all(torch.allclose(noisy[name], whole[name], atol=1e-6) for name in noisy)


def test_the_noise_is_added_to_the_embeddings(tiny_llama_folder):
    """The same gradient by hand: embeddings plus the noise, given to the model as they are."""
    engine = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=10_000)
    batch = kit.batch().select(torch.tensor([2]))
    found = engine.gradients(batch, NOISY)["model.norm.weight"]
    model = engine.model.module
    model.zero_grad()
    tokens = batch.sequences.tokens.flat[None]
    inputs = model.get_input_embeddings()(tokens)
    noise = neftune_noise(batch.sequences.tokens.lens, NOISY.noise_keys(batch), 5.0, inputs.shape[-1])
    weight = model.model.norm.weight.requires_grad_(True)
    positions = torch.arange(tokens.shape[1])[None]
    cuts = torch.tensor([0, tokens.shape[1]], dtype=torch.int32)
    logits = model(inputs_embeds=inputs + noise, position_ids=positions, cu_seq_lens_q=cuts, use_cache=False).logits[0]
    index = batch.sequences.response_index()
    logp = torch.log_softmax(logits[index - 1], -1).gather(1, tokens[0][index][:, None])
    (-logp.mean()).backward()
    assert weight.grad is not None
    assert torch.allclose(found, weight.grad, atol=1e-6)
