"""SmolLM2: real tokens, real vocabulary, tied embeddings."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer
from vllm_kit import gap, moved, prompts_of, running, spec_of, trainer_of, weights_of

from tutelage.rollout.inprocess.engine import InProcessRollout

pytestmark = [pytest.mark.vllm, pytest.mark.shared]


def assert_close(trainer, rollout):
    """Both differ from float64 by up to 5e-5 where a token has a probability of 1e-5."""
    ours = trainer.logprobs(rollout.sequences, 1.0).flat
    assert float((ours - rollout.rollout_logp.flat).abs().mean()) < 1e-5
    assert gap(trainer, rollout, 1.0) < 1e-4


def test_smollm2_answers_as_the_in_process_engine_and_takes_new_weights(small_models):
    folder = small_models / "smollm2-135m-instruct"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in ("Name three colours, one per line.", "What is the capital of France?")
    ]
    spec = spec_of(
        folder,
        tokenizer,
        config={"max_model_len": 128, "kv_cache_memory_bytes": 256 << 20},
        eos_ids=(tokenizer.eos_token_id,),
        temperature=1.0,
    )
    trainer = trainer_of(folder, temperature=1.0)
    inprocess = InProcessRollout(trainer.model.model, tokenizer, spec.eos_ids, spec.params, seed=spec.seed)
    greedy = prompts_of(rows, greedy=True, purpose="evaluation")
    with running(spec) as engine:
        ours, want = engine.generate(greedy), inprocess.generate(greedy)
        assert ours.texts == want.texts
        assert ours.sequences.response_rows() == want.sequences.response_rows()
        assert_close(trainer, engine.generate(prompts_of(rows, n=4)))
        engine.load_weights(weights_of(moved(trainer, 1, size=0.002)).items(), 1)
        rollout = engine.generate(prompts_of(rows, n=4))
        assert rollout.weights_version.tolist() == [1] * 8
        assert_close(trainer, rollout)
