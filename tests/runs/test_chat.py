"""Talking to a model folder."""

from __future__ import annotations

import pytest

from tutelage.build import chat_engine
from tutelage.errors import RolloutError
from tutelage.rollout.sampling import SamplingParams


def test_chat_repeats_itself_for_a_seed_and_stays_inside_the_context(tiny_llama_folder):
    engine = chat_engine(str(tiny_llama_folder))
    assert engine.context is not None
    message = [{"role": "user", "content": "why"}]
    prompt = len(engine.template.encode_prompt(message))
    params = engine.fitting(SamplingParams(max_new_tokens=10**6), prompt)
    assert params.max_new_tokens == engine.context - prompt
    answers = [engine.complete(message, seed=s, max_new_tokens=20, temperature=0.9, top_p=0.95) for s in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_a_conversation_longer_than_the_context_is_refused_with_its_length(tiny_llama_folder):
    engine = chat_engine(str(tiny_llama_folder))
    with pytest.raises(RolloutError, match=rf"the model's context is {engine.context}"):
        engine.complete([{"role": "user", "content": "x" * 5000}], max_new_tokens=4)
