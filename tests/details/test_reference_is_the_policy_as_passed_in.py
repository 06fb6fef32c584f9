"""The reference: an exact, frozen snapshot of the policy that was passed in, whatever its name holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from details_kit import plain, plain_logprobs
from peft import LoraConfig, PeftModel, get_peft_model

from tutelage.build import kit


def change(model: torch.nn.Module) -> None:
    """Add 0.1 to one matrix, the base's where there is an adapter."""
    found = [p for name, p in model.named_parameters() if "layers.0.mlp.up_proj" in name and "lora" not in name]
    assert len(found) == 1
    with torch.no_grad():
        found[0].add_(0.1)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_policy_changed_in_memory_is_its_own_reference(lora_rank, make_ppo, tiny_llama_folder, monkeypatch):
    load, loaded = kit.load_causal_lm, 0

    def load_then_change(cfg, *args, **kwargs):
        nonlocal loaded
        policy = load(cfg, *args, **kwargs)
        if loaded == 0:
            change(policy.model)
        loaded += 1
        return policy

    monkeypatch.setattr(kit, "load_causal_lm", load_then_change)
    batch = make_ppo(model={"lora_rank": lora_rank}).collect()
    assert torch.equal(batch.ref_logp.flat, batch.old_logp.flat)
    twin = plain(tiny_llama_folder)
    by_name = plain_logprobs(twin, batch.sequences, 0.7)
    change(twin)
    as_passed_in = plain_logprobs(twin, batch.sequences, 0.7)
    assert float((by_name - as_passed_in).abs().max()) > 0.1
    torch.testing.assert_close(batch.ref_logp.flat, as_passed_in, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_reference_stays_while_the_policy_moves(lora_rank, make_ppo):
    built = make_ppo(model={"lora_rank": lora_rank}, optim={"schedule": "constant"})
    batch = built.scored()
    for _ in range(2 if lora_rank else 1):  # the first update of an adapter moves its B alone, away from 0
        built.update(batch)
    after = built.roles.reference.logprobs(batch).gather()
    assert torch.equal(after.flat, batch.ref_logp.flat)
    moved = built.roles.actor.logprobs(batch).gather().flat - batch.old_logp.flat
    assert float(moved.abs().max()) > 0.01


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_adapter_that_arrives_with_the_policy_is_part_of_the_reference(
    lora_rank, make_ppo, tiny_llama_folder, tiny_tokenizer, tmp_path: Path
):
    torch.manual_seed(4)
    made = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(plain(tiny_llama_folder), made)
    adapted.peft_config["default"].base_model_name_or_path = str(tiny_llama_folder)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    tiny_tokenizer.save_pretrained(tmp_path / "adapter")
    batch = make_ppo(tmp_path / "adapter", model={"lora_rank": lora_rank}).collect()
    with_adapter = PeftModel.from_pretrained(plain(tiny_llama_folder), str(tmp_path / "adapter")).eval()
    expected = plain_logprobs(with_adapter, batch.sequences, 0.7)
    without = plain_logprobs(plain(tiny_llama_folder), batch.sequences, 0.7)
    assert float((expected - without).abs().max()) > 0.1
    torch.testing.assert_close(batch.ref_logp.flat, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(batch.old_logp.flat, expected, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
def test_the_reference_computes_in_the_precision_of_the_policy(make_ppo):
    batch = make_ppo(model={"dtype": "bfloat16"}).collect()
    assert torch.equal(batch.ref_logp.flat, batch.old_logp.flat)


def test_no_weight_of_reference_or_reward_model_is_trained(make_ppo, llama_reward_folder):
    built = make_ppo(reward={"model": str(llama_reward_folder), "rules": []})
    for role in ("reference", "reward"):
        module = built.engine(role).model.module
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())
