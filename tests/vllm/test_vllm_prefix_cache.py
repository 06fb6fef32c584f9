"""The prefix cache across publications."""

from __future__ import annotations

import pytest
from vllm_kit import gap, moved, prompts_of, running, spec_of, trainer_of, weights_of

pytestmark = pytest.mark.vllm


def test_cached_prefixes_are_of_the_new_weights(tiny_llama_folder, tiny_tokenizer):
    """A prompt longer than a block of the cache is cached; the cache of old weights must not be read."""
    trainer = trainer_of(tiny_llama_folder)
    longer = prompts_of([[*range(4, 104), *range(4, 104)]], n=2)
    spec = spec_of(tiny_llama_folder, tiny_tokenizer, config={"max_model_len": 256, "engine_args": {"block_size": 32}})
    with running(spec) as cached:
        cached.generate(longer)
        cached.load_weights(weights_of(moved(trainer, 6)).items(), 1)
        assert gap(trainer, cached.generate(longer)) < 1e-5
