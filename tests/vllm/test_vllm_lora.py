"""A LoRA policy: published as merged weights, or as its adapter over the base."""

from __future__ import annotations

import pytest
from vllm_kit import gap, moved, prompts_of, running, spec_of, trainer_of

from tutelage.errors import RolloutError
from tutelage.models.lora import merged_weights, save_adapter

pytestmark = pytest.mark.vllm
PROMPTS = prompts_of(n=3)


def lora_trainer(folder):
    """B starts at 0, so it is moved: the adapter must change the logprobs."""
    return moved(trainer_of(folder, lora_rank=4, lora_alpha=8.0), 1, size=0.1)


def test_merged_weights(tiny_llama_folder, tiny_tokenizer):
    trainer = lora_trainer(tiny_llama_folder)
    every = trainer.model.masters.full_precision()
    with running(spec_of(tiny_llama_folder, tiny_tokenizer)) as engine:
        assert gap(trainer, engine.generate(PROMPTS)) > 0.05
        engine.load_weights(merged_weights(trainer.model.module, every).items(), 1)
        assert gap(trainer, engine.generate(PROMPTS)) < 1e-5
        with pytest.raises(RolloutError, match=r"vllm.lora is merged"):
            engine.load_adapter("nowhere", 2)


def test_an_adapter_is_replaced_in_place(tiny_llama_folder, tiny_tokenizer, tmp_path):
    trainer = lora_trainer(tiny_llama_folder)
    config = {"lora": "adapter"}
    with running(spec_of(tiny_llama_folder, tiny_tokenizer, config=config, lora_rank=4)) as engine:
        assert gap(trainer_of(tiny_llama_folder), engine.generate(PROMPTS)) < 1e-5
        for version in (1, 2):
            moved(trainer, version + 1, size=0.03)
            save_adapter(trainer.model.adapted, trainer.model.masters.full_precision(), tmp_path / str(version))
            engine.load_adapter(str(tmp_path / str(version)), version)
            rollout = engine.generate(PROMPTS)
            assert rollout.weights_version.tolist() == [version] * 12
            assert gap(trainer, rollout) < 1e-5
