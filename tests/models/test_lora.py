"""LoRA: the reference is the untouched model, exactly; merged and adapter folders."""

from __future__ import annotations

from pathlib import Path

import model_kit as kit
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tutelage.config.common import ModelConfig
from tutelage.errors import ModelError
from tutelage.models.forward import token_logprobs
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.models.lora import adapter_off


def settings(path: Path, **changes: object) -> ModelConfig:
    return ModelConfig(path=str(path), **changes)


@pytest.fixture(params=["llama", "gpt2"])
def folder(request, tmp_path):
    kit.build(request.param).save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def adapted(folder: Path):
    """A policy whose adapter is no longer 0."""
    policy = load_causal_lm(settings(folder, lora_rank=3, lora_alpha=6.0), kit.WordTokenizer())
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return policy


def test_every_linear_layer_but_the_head_has_an_adapter_and_nothing_else_is_trained(folder):
    policy = load_causal_lm(settings(folder, lora_rank=3), kit.WordTokenizer())
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in policy.model.named_parameters() if ".lora_" in name}
    assert set(policy.masters.masters) == trained
    layers = 7 if "llama" in str(folder.name) else 4
    assert len(trained) == 2 * 2 * layers
    assert not any("lm_head" in name for name in trained)


def test_a_new_adapter_changes_nothing(folder):
    plain = load_causal_lm(settings(folder), kit.WordTokenizer())
    fresh = load_causal_lm(settings(folder, lora_rank=3), kit.WordTokenizer())
    seqs = kit.sequences()
    assert torch.equal(token_logprobs(fresh, seqs)[0], token_logprobs(plain, seqs)[0])


def test_with_the_adapter_off_the_model_is_exactly_the_untouched_one(folder):
    plain, policy, seqs = load_causal_lm(settings(folder), kit.WordTokenizer()), adapted(folder), kit.sequences()
    expected = token_logprobs(plain, seqs, 0.7)[0]
    with_adapter = token_logprobs(policy, seqs, 0.7)[0]
    assert float((with_adapter - expected).abs().max()) > 0.1
    with adapter_off(policy.adapted):
        assert torch.equal(token_logprobs(policy, seqs, 0.7)[0], expected)
    assert torch.equal(token_logprobs(policy, seqs, 0.7)[0], with_adapter)


def test_switching_off_and_on_keeps_what_is_trained(folder):
    policy = adapted(folder)
    first = next(p for name, p in policy.model.named_parameters() if ".lora_" in name)
    first.requires_grad_(False)
    flags = [p.requires_grad for p in policy.model.parameters()]
    with adapter_off(policy.adapted):
        pass
    assert [p.requires_grad for p in policy.model.parameters()] == flags


def test_a_model_without_an_adapter_has_none_to_switch_off():
    with pytest.raises(ModelError, match="no adapter"), adapter_off(None):
        pass


def test_a_policy_with_lora_takes_no_snapshot(folder):
    with pytest.raises(ModelError, match="needs no snapshot"):
        adapted(folder).snapshot()


def test_the_saved_folder_is_the_merged_model_and_the_adapter_folder_is_pefts(folder, tmp_path):
    policy, row = adapted(folder), torch.arange(3, 20)[None]
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    policy.save_pretrained(tmp_path / "saved")
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    base = AutoModelForCausalLM.from_pretrained(folder)
    with_peft = PeftModel.from_pretrained(base, str(tmp_path / "saved" / "adapter")).eval()
    with torch.no_grad():
        expected = policy.model(input_ids=row, cu_seq_lens_q=torch.tensor([0, 17])).logits
        torch.testing.assert_close(merged(input_ids=row).logits, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(with_peft(input_ids=row).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_scalar_model_with_lora_trains_its_head_and_saves_merged(kind, tmp_path):
    kit.build(kind).save_pretrained(tmp_path / "m")
    model = load_scalar_model(settings(tmp_path / "m", lora_rank=2), "reward", tokenizer=kit.WordTokenizer())
    trained = set(model.masters.masters)
    assert {"score.weight", "score.bias"} <= trained
    assert all(name.startswith("score.") or ".lora_" in name for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05)
    tokens = kit.sequences().tokens
    model.save_pretrained(tmp_path / "saved")
    again = load_scalar_model(settings(tmp_path / "saved"), "reward", tokenizer=kit.WordTokenizer(), needs_head=True)
    torch.testing.assert_close(again.scores(tokens), model.scores(tokens), atol=1e-4, rtol=0)
    assert (tmp_path / "saved" / "adapter" / "adapter_model.safetensors").is_file()
