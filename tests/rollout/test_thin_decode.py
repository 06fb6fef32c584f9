"""Rollouts of a model wide enough for products in blocks, on two threads: the model's own logprobs, also with LoRA."""

from __future__ import annotations

import pytest
import torch
from rollout_kit import PROMPTS, VOCAB, make_engine, make_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from tutelage.models import lora, thin_products
from tutelage.models.attention import register


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def wide_model() -> LlamaForCausalLM:
    """All seven layers of a block make four blocks or more."""
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.06,
        attn_implementation="tutelage",
        eos_token_id=256,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("rank", [0, 4])
def test_what_is_drawn_in_blocks_has_the_logprobs_of_the_model(byte_tokenizer, monkeypatch, rank):
    model = wide_model()
    if rank:
        lora.attach(model, rank, 8.0)
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    seen = []
    real = thin_products.thin_product
    monkeypatch.setattr(thin_products, "thin_product", lambda *args: (seen.append(args[0].shape[0]), real(*args))[1])
    rollout = make_engine(model, byte_tokenizer).generate(make_prompts(PROMPTS, n=3))
    assert len(seen) % (2 * 7) == 0
    assert max(seen) > 4, "decode steps of several rows went in blocks"
    assert not any("forward" in vars(module) for module in model.modules())
    model.set_attn_implementation("sdpa")
    rows = zip(rollout.sequences.tokens.rows(), rollout.sequences.prompt_lens.tolist(), strict=True)
    for (row, prompt), found in zip(rows, rollout.rollout_logp.rows(), strict=True):
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=row[None]).logits[0].double() / 0.7, dim=-1)
        wanted = torch.stack([logp[t - 1, row[t]] for t in range(prompt, len(row))])
        torch.testing.assert_close(found.double(), wanted, atol=2e-4, rtol=1e-4)
