"""The demo's model folder: a tiny Llama with random weights and the demo tokenizer, as transformers saves them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tutelage.demo.language import every_sentence
from tutelage.demo.tokenizer import build_tokenizer
from tutelage.models.paths import quiet

HIDDEN_SIZE = 64
LAYERS = 2
HEAD_DIM = 32
CONTEXT = 128


def build_model_folder(dest: Path, seed: int, texts: Iterable[str] | None = None) -> Path:
    """Write a `LlamaForCausalLM` (2 layers, width 64, about 0.1 M parameters, tied embeddings) and its tokenizer.

    texts: the tokenizer's source, by default the demo language. The weights depend on `seed` and the size of the
    vocabulary alone; torch's global random state is left as it was. Returns `dest`.
    """
    tokenizer = build_tokenizer(every_sentence() if texts is None else texts)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN_SIZE // HEAD_DIM,
        num_key_value_heads=HIDDEN_SIZE // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        initializer_range=0.05,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with quiet():
        model.save_pretrained(dest)
    tokenizer.save_pretrained(dest)
    return dest
