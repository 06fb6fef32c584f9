"""Loading: wrong paths, incomplete folders, adapters, precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import model_kit as kit
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, T5Config

from tutelage.config.common import ModelConfig
from tutelage.errors import ModelError, ModelNotFoundError
from tutelage.models.forward import token_logprobs
from tutelage.models.load import (
    context_length,
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
    require_model,
    weights_size,
)


def settings(path: Path | str, **changes: object) -> ModelConfig:
    return ModelConfig(path=str(path), **changes)


def test_a_folder_that_does_not_exist_names_the_closest_one(tiny_llama_folder, tmp_path):
    shutil.copytree(tiny_llama_folder, tmp_path / "sft-model")
    with pytest.raises(ModelNotFoundError, match=r"sft-modle does not exist. Did you mean sft-model\?\n  fix: give"):
        load_causal_lm(settings(tmp_path / "sft-modle"))
    with pytest.raises(FileNotFoundError, match="nearest folder that exists"):
        require_model(str(tmp_path / "no" / "such" / "place"))


def test_a_run_folder_is_not_a_model_folder_and_its_model_is_named(tiny_llama_folder, tmp_path):
    shutil.copytree(tiny_llama_folder, tmp_path / "step_000010" / "model")
    with pytest.raises(ModelNotFoundError, match=r"has no config.json; it holds model\n  fix: use .*step_000010/model"):
        require_model(str(tmp_path / "step_000010"))
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        require_model(str(tmp_path / "file.txt"))


def test_a_hub_name_without_a_connection(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"nobody/no-such-model is no folder here.*\n  fix: check the name"):
        load_causal_lm(settings("nobody/no-such-model"))


def test_pickled_weights_are_never_opened(tiny_llama_folder, tmp_path):
    shutil.copytree(tiny_llama_folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights"):
        load_causal_lm(settings(tmp_path / "m"))


def test_missing_weights_are_an_error_and_not_random_numbers(tiny_llama_folder, tmp_path):
    shutil.copytree(tiny_llama_folder, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"has no weights for layers\.2|has no weights for model\.layers\.2"):
        load_causal_lm(settings(tmp_path / "m"))


def test_a_damaged_config_is_an_error(tiny_llama_folder, tmp_path):
    shutil.copytree(tiny_llama_folder, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_causal_lm(settings(tmp_path / "m"))


def test_a_folder_without_a_tokenizer(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path / "m"))


def test_a_tokenizer_with_more_tokens_than_embeddings(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="91 tokens, the model 90 embeddings"):
        load_causal_lm(settings(tmp_path / "m"), kit.WordTokenizer(91))


def test_an_encoder_is_no_policy(tmp_path):
    config = BertConfig(vocab_size=90, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96)
    BertLMHeadModel(config).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="is an encoder"):
        load_causal_lm(settings(tmp_path / "m"), kit.WordTokenizer())


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path):
    T5Config(num_layers=1).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="encoder-decoder"):
        load_scalar_model(settings(tmp_path / "m"), "reward", tokenizer=kit.WordTokenizer())


def test_what_is_known_without_weights(tiny_llama_folder, tiny_gpt2_folder):
    assert context_length(str(tiny_llama_folder)) == 512
    assert context_length(str(tiny_gpt2_folder)) == 256
    assert weights_size(str(tiny_llama_folder)) == (tiny_llama_folder / "model.safetensors").stat().st_size
    assert weights_size("gpt2") == 0


def test_an_adapter_that_arrives_with_the_policy_is_merged_first(tmp_path):
    base = kit.build("llama")
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    row = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = adapted.eval()(input_ids=row).logits
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(input_ids=row).logits
    assert float((expected - plain).abs().max()) > 0.1
    policy = load_causal_lm(settings(tmp_path / "adapter"), kit.WordTokenizer())
    reference = policy.snapshot()
    for model in (policy, reference):
        assert not any("lora" in name for name, _ in model.model.named_parameters())
        with torch.no_grad():
            logits = kit.native(model.model)(input_ids=row).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert weights_size(str(tmp_path / "adapter")) > (tmp_path / "base" / "model.safetensors").stat().st_size


def test_a_pickled_adapter_is_never_opened(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    about = {"base_model_name_or_path": str(tmp_path / "base"), "peft_type": "LORA"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled adapters"):
        load_causal_lm(settings(tmp_path / "adapter"), kit.WordTokenizer())


def test_a_snapshot_is_exact_frozen_and_independent(tiny_llama_folder):
    policy = load_causal_lm(settings(tiny_llama_folder))
    with torch.no_grad():
        policy.model.model.layers[0].mlp.up_proj.weight.add_(0.1)  # the policy as passed in is not what its name holds
    seqs = kit.sequences()
    before = token_logprobs(policy, seqs)[0].detach()
    reference = policy.snapshot()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(token_logprobs(reference, seqs)[0], before)
    assert not any(p.requires_grad for p in reference.model.parameters())


@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
def test_bfloat16_computes_with_rounded_weights_and_keeps_float32_masters(tiny_llama_folder):
    exact, rounded = (
        load_causal_lm(settings(tiny_llama_folder)),
        load_causal_lm(settings(tiny_llama_folder, dtype="bfloat16")),
    )
    assert {p.dtype for p in rounded.model.parameters()} == {torch.bfloat16}
    assert rounded.model.model.rotary_emb.inv_freq.dtype == torch.float32
    for name, master in rounded.masters.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master, exact.masters.masters[name])
    seqs = kit.sequences()
    difference = token_logprobs(exact, seqs)[0] - token_logprobs(rounded, seqs)[0]
    assert 0 < difference.detach().abs().mean().item() < 0.1


def test_a_missing_bfloat16_unit_is_said(tiny_llama_folder, monkeypatch):
    monkeypatch.setattr("tutelage.models.weights.cpu_has_bfloat16", lambda: False)
    with pytest.warns(UserWarning, match="no bfloat16 instructions"):
        load_causal_lm(settings(tiny_llama_folder, dtype="bfloat16"))
