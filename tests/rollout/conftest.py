"""A tokenizer of single bytes, in which a character may be several tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Ids 0-255 are the bytes (in the order of the byte-level alphabet), 256 is <eos>, 257 <pad>, 258 <user>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", additional_special_tokens=["<user>"]
    )
