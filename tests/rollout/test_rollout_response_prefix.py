"""A template may write text between its generation prompt and the answer: sampled and trained, but not in the text."""

from __future__ import annotations

import json

import pytest
import torch
from rollout_kit import make_engine, make_model, make_prompts

from tutelage.build.data import batch_maker, stage_data
from tutelage.build.stages import build_stage
from tutelage.config import PPOConfig
from tutelage.data.chat import ChatTemplate
from tutelage.layout import Place


def force(model, tokens):
    """From here on the model always answers with these tokens, and with the last of them again and again."""
    calls = []

    def head(module, args, output):
        output.logits[:] = 0.0
        output.logits[..., tokens[min(len(calls), len(tokens) - 1)]] = 60.0
        calls.append(1)

    model.register_forward_hook(head)
    return model


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("text", ["ab c", "a", "x\n\nHuman", "na\u00efve"])
def test_the_text_of_an_answer_is_encoded_to_the_tokens_that_were_sampled(text, finished, byte_tokenizer):
    template = ChatTemplate(byte_tokenizer, "hh")
    assert template.response_prefix == " "
    wanted = template.encode_response(text, finished=finished)
    engine = make_engine(
        force(make_model("gpt2"), wanted),
        byte_tokenizer,
        max_new_tokens=len(wanted),
        response_prefix=template.response_prefix,
    )
    rollout = engine.generate(make_prompts([template.encode_prompt([{"role": "user", "content": "q"}])]))
    assert rollout.sequences.response_rows() == [wanted]
    assert rollout.finished.tolist() == [finished]
    assert rollout.texts == (text,)
    assert template.encode_response(rollout.texts[0], finished=finished) == rollout.sequences.response_rows()[0]


def test_one_prefix_only_is_taken_away_and_none_where_the_answer_does_not_begin_with_it(byte_tokenizer):
    for sampled, text in (("  b", " b"), ("b c", "b c")):
        ids = byte_tokenizer(sampled, add_special_tokens=False)["input_ids"]
        engine = make_engine(force(make_model("gpt2"), [*ids, 256]), byte_tokenizer, response_prefix=" ")
        assert engine.generate(make_prompts([[1, 2]])).texts == (text,)


def test_rollouts_of_a_run_know_the_prefix_of_its_template(tiny_llama_folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("tea", "why", "rain")))
    cfg = PPOConfig.model_validate(
        {
            "model": {"path": str(tiny_llama_folder), "chat_template": "hh"},
            "data": {"train": str(tmp_path / "rows.jsonl"), "eval_fraction": 0.0},
            "rollout": {"max_new_tokens": 8, "prompts_per_step": 3},
            "ppo": {"epochs": 1, "minibatches": 1},
            "reward": {"rules": [{"function": "length_range(low=2)"}]},
        }
    )
    data = stage_data(cfg)
    stage = build_stage(cfg, data)
    actor = stage.builder(stage.names, Place()).roles["actor"]
    wanted = data.template.encode_response("it is you")
    force(actor.engine.model.model, wanted)
    rollout = actor.generate(batch_maker(data.prepared.train, cfg)(torch.arange(3), 0))
    assert rollout.sequences.response_rows() == [wanted] * 3
    assert rollout.texts == ("it is you",) * 3
