"""Rollouts in bfloat16 whose decode steps multiply with ordered copies of the weights."""

from __future__ import annotations

import pytest
import torch
from rollout_kit import PROMPTS, VOCAB, make_engine, make_prompts, rows_of
from transformers import LlamaConfig, LlamaForCausalLM

from tutelage.models import lora, packed_products
from tutelage.models.attention import register
from tutelage.models.packed_products import FEWEST_STEPS, MOST_ROWS, PackedLayers

pytestmark = pytest.mark.skipif(not packed_products._supported(), reason="no bfloat16 products of oneDNN here")


def model_of(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.06,
        attn_implementation="tutelage",
        eos_token_id=256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype)


@pytest.fixture
def packings(monkeypatch):
    """How many matrices were ordered."""
    seen, real = [], packed_products._forward
    monkeypatch.setattr(packed_products, "_forward", lambda layer: (seen.append(layer), real(layer))[1])
    return seen


@pytest.mark.parametrize("rank", [0, 4])
def test_the_rollout_is_that_of_the_plain_products(byte_tokenizer, monkeypatch, packings, rank):
    model = model_of()
    if rank:
        lora.attach(model, rank, 8.0)
    engine = make_engine(model, byte_tokenizer, max_new_tokens=FEWEST_STEPS)
    prompts = make_prompts(PROMPTS, n=3)
    found = engine.generate(prompts)
    assert len(packings) == 2 * 7 + 1, "each matrix once for all steps, the output layer's too"
    assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setattr(packed_products, "_supported", lambda: False)
    want = engine.generate(prompts)
    assert len(packings) == 2 * 7 + 1
    same = 0
    pairs = zip(found.sequences.response_rows(), want.sequences.response_rows(), strict=True)
    for (ours, plain), logp, wanted in zip(pairs, found.rollout_logp.rows(), want.rollout_logp.rows(), strict=True):
        if ours == plain:  # rounding may move a draw across a boundary, on some processors
            same += 1
            torch.testing.assert_close(logp, wanted, atol=0.05, rtol=0)
    assert same >= 0.75 * len(want)


def test_the_next_call_orders_the_weights_anew(byte_tokenizer, packings):
    model = model_of()
    engine = make_engine(model, byte_tokenizer, max_new_tokens=FEWEST_STEPS)
    first = engine.generate(make_prompts(PROMPTS, n=1))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    second = engine.generate(make_prompts(PROMPTS, n=1))
    fresh = model_of()
    with torch.no_grad():
        for weight in fresh.parameters():
            weight.mul_(0.5)
    want = make_engine(fresh, byte_tokenizer, max_new_tokens=FEWEST_STEPS).generate(make_prompts(PROMPTS, n=1))
    assert rows_of(second) == rows_of(want)
    assert rows_of(first) != rows_of(second)


def test_short_answers_and_other_types_are_left_alone(byte_tokenizer, packings):
    make_engine(model_of(), byte_tokenizer, max_new_tokens=FEWEST_STEPS - 1).generate(make_prompts(PROMPTS, n=1))
    wide = make_engine(model_of(torch.float32), byte_tokenizer, max_new_tokens=FEWEST_STEPS)
    wide.generate(make_prompts(PROMPTS, n=1))
    assert packings == []


def test_a_layer_on_which_something_hangs_is_left_alone():
    model = model_of()
    assert len(PackedLayers(model, FEWEST_STEPS)) == 2 * 7 + 1
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *args: None)
    assert len(PackedLayers(model, FEWEST_STEPS)) == 2 * 7


@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
def test_a_product_has_the_shape_and_the_values_of_the_layer(rows):
    layer = torch.nn.Linear(130, 70).bfloat16()
    x = torch.randn(rows, 1, 130).bfloat16()
    with torch.no_grad():
        want = layer(x)
        with PackedLayers(torch.nn.Sequential(layer), FEWEST_STEPS).in_order():
            found = layer(x)
    assert found.shape == (rows, 1, 70)
    torch.testing.assert_close(found, want, atol=2**-8, rtol=2**-7)


def test_with_gradients_a_layer_multiplies_as_ever():
    layer, x = torch.nn.Linear(130, 70).bfloat16(), torch.randn(3, 130).bfloat16().requires_grad_(True)
    with PackedLayers(torch.nn.Sequential(layer), FEWEST_STEPS).in_order():
        layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None


def test_a_large_model_has_no_copies_and_neither_has_one_whose_kernels_are_off(monkeypatch):
    layer = torch.nn.Sequential(torch.nn.Linear(130, 70).bfloat16())
    monkeypatch.setattr(packed_products, "MOST_BYTES", 130 * 70 * 2)
    assert len(PackedLayers(layer, FEWEST_STEPS)) == 1
    monkeypatch.setattr(packed_products, "MOST_BYTES", 130 * 70 * 2 - 1)
    assert len(PackedLayers(layer, FEWEST_STEPS)) == 0
    monkeypatch.undo()
    monkeypatch.setenv("TUTELAGE_KERNELS", "off")
    assert len(PackedLayers(layer, FEWEST_STEPS)) == 0
