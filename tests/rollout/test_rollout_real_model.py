"""The in-process engine on a real model and a real tokenizer."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tutelage.models.attention import register
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams

pytestmark = pytest.mark.shared


def test_smollm2_answers_as_under_plain_transformers(small_models):
    register()
    folder = small_models / "smollm2-135m-instruct"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="tutelage")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in ("Name three colours, one per line.", "What is the capital of France?")
    ]
    engine = InProcessRollout(
        model, tokenizer, (tokenizer.eos_token_id,), SamplingParams(max_new_tokens=10, stop=(" France",)), seed=0
    )
    answers = engine.complete(prompts, engine.params.with_greedy())
    assert answers.texts[1] == "The capital of France"
    assert answers.finished.tolist() == [False, True]
    model.set_attn_implementation("sdpa")
    for prompt, response in zip(prompts, answers.sequences.response_rows(), strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            want = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=len(response),
                pad_token_id=tokenizer.eos_token_id,
            )
        assert response == want[0, len(prompt) :].tolist()
