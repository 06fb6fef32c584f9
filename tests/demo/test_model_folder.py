"""The demo's model folder: an ordinary Hugging Face folder whose tokenizer gives every text of the language back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tutelage.demo.corpus import write_answer
from tutelage.demo.language import every_prompt, every_sentence
from tutelage.demo.model import build_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("demo_model"), seed=0)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def test_every_prompt_and_answer_comes_back_exactly_and_has_no_unknown_token(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rng = random.Random(0)
    texts = [text for prompt in every_prompt() for text in (prompt, write_answer(prompt, rng))] + every_sentence()
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text


def test_a_rendered_chat_starts_with_its_prompt_and_ends_in_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    user, assistant = (
        {"role": "user", "content": "Tell me about cats."},
        {"role": "assistant", "content": "It depends."},
    )
    whole = tokenizer.apply_chat_template([user, assistant], tokenize=False)
    assert whole == "<|im_start|>user\nTell me about cats.<|im_end|>\n<|im_start|>assistant\nIt depends.<|im_end|>"
    prompt_ids = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    whole_ids = tokenizer.apply_chat_template([user, assistant], return_dict=False)
    assert isinstance(whole_ids, list)
    assert whole_ids[: len(prompt_ids)] == prompt_ids
    assert [tokenizer.decode(cast(int, i)) for i in whole_ids[len(prompt_ids) :]] == [
        "It",
        " depends",
        ".",
        "<|im_end|>",
    ]
    assert whole_ids[-1] == tokenizer.eos_token_id


def test_special_tokens_are_four_different_ones(tokenizer: PreTrainedTokenizerBase) -> None:
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert len({tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id, start}) == 4
    assert 150 <= len(tokenizer) <= 500


def test_the_weights_are_a_function_of_the_seed_and_the_global_state_is_left_alone(
    folder: Path, tmp_path: Path
) -> None:
    before = torch.random.get_rng_state()
    again = build_model_folder(tmp_path / "again", seed=0)
    other = build_model_folder(tmp_path / "other", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    first, same, different = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, again, other)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], different["model.embed_tokens.weight"])


def test_the_model_is_tied_tiny_and_fits_its_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.head_dim >= 32
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
