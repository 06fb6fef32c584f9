"""Small data files and reward-model folders for the details of PPO."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from details_kit import Built, build, ppo_config

from tutelage.config.common import ModelConfig
from tutelage.models.load import load_scalar_model


@pytest.fixture(scope="session")
def write_rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[dict[str, Any]]], Path]:
    """Rows as a JSONL file."""

    def write(rows: list[dict[str, Any]]) -> Path:
        path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture(scope="session")
def prompts(write_rows: Callable[[list[dict[str, Any]]], Path]) -> Path:
    return write_rows([{"prompt": text} for text in ("tea", "what is rain", "why", "the sea", "a map", "tell me more")])


@pytest.fixture
def make_ppo(prompts: Path, tiny_llama_folder: Path) -> Callable[..., Built]:
    """make_ppo(folder of the policy, section={...}): the PPO stage of `details_kit.ppo_config`."""

    def make(folder: Path | str = tiny_llama_folder, /, **sections: dict[str, Any]) -> Built:
        return build(ppo_config(folder, prompts, **sections))

    return make


def _reward_folder(model: Path, folder: Path) -> Path:
    load_scalar_model(ModelConfig(path=str(model)), "reward", seed=5).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_reward_folder(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the policy's own tokenizer and template."""
    return _reward_folder(tiny_llama_folder, tmp_path_factory.mktemp("llama_reward") / "m")


@pytest.fixture(scope="session")
def bert_reward_folder(tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with a tokenizer of its own; mean pooling."""
    return _reward_folder(tiny_bert_folder, tmp_path_factory.mktemp("bert_reward") / "m")
