"""What goes wrong between a row of text and a pair's logprobs: boundaries, ends, cuts, empty answers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

import dpo_kit

from tutelage.algorithms.preference import preference_loss
from tutelage.config.common import DataConfig
from tutelage.data.chat import ChatTemplate
from tutelage.data.prepare import Prepared, prepare_pairs
from tutelage.errors import TrainingError
from tutelage.types import Outputs, Pairs, Ragged, Sequences

EOS = 2


def prepared(folder: Path, tokenizer: Any, rows: list[dict[str, str]], **settings: Any) -> Prepared[Pairs]:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(train=str(path), eval_fraction=0.0, **{"max_bad_fraction": 1.0, **settings})
    return prepare_pairs(cfg, ChatTemplate(tokenizer, "plain"), 0)


def row(prompt: str, chosen: str = "good", rejected: str = "bad") -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_a_prompt_and_its_answer_do_not_merge_across_their_boundary(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """The tokenizer would write "t" + "h" as one token; the boundary stays where the text has it, on both sides."""
    pairs = prepared(tmp_path, tiny_tokenizer, [row("a t", chosen="he", rejected="ho")]).train
    whole = tiny_tokenizer("a the", add_special_tokens=False).input_ids
    prompt = tiny_tokenizer("a t", add_special_tokens=False).input_ids
    assert whole[: len(prompt)] != prompt, "a careless tokenisation of the whole text would move the boundary"
    assert pairs.chosen.prompt_rows() == pairs.rejected.prompt_rows()
    prompts = [tiny_tokenizer.decode(ids) for ids in pairs.chosen.prompt_rows()]
    answers = [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in pairs.chosen.response_rows()]
    assert prompts[0].strip().endswith("t")
    assert answers[0].strip() == "he"


def test_an_eos_in_the_prompt_is_no_end_and_the_answers_end_is_trained(tiny_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"},
                        {"role": "user", "content": "more"}],
             "chosen": [{"role": "assistant", "content": "good"}],
             "rejected": [{"role": "assistant", "content": "bad"}]}]  # fmt: skip
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    cfg = DataConfig(train=str(path), eval_fraction=0.0)
    pairs = prepare_pairs(cfg, ChatTemplate(tiny_tokenizer, "chatml"), 0).train
    assert EOS in pairs.chosen.prompt_rows()[0], "the turn before ended"
    for side, text in ((pairs.chosen, "good"), (pairs.rejected, "bad")):
        ids = side.response_rows()[0]
        assert tiny_tokenizer.decode(ids[: ids.index(EOS)]) == text
        assert bool(side.trained.flat[: ids.index(EOS) + 1].all()), "from the first token to the end of the answer"


def test_the_first_token_of_an_answer_moves_the_loss(tiny_llama_folder: Path) -> None:
    """Two answers that differ in their first token alone are no tie."""
    chosen, rejected = Sequences.build([[5, 6]], [[11, 30]]), Sequences.build([[5, 6]], [[12, 30]])
    batch = Pairs(chosen, rejected, torch.zeros(1), ("a",))
    engine = dpo_kit.engine(tiny_llama_folder, 100)
    batch = batch.adding(ref_logp=Ragged(torch.zeros(4), batch.sequences.response_lens))
    loss = preference_loss(dpo_kit.config(beta=1.0).dpo)
    stats = engine.evaluate(batch, loss)
    plain, by_hand = AutoModelForCausalLM.from_pretrained(tiny_llama_folder).eval(), 0.0
    with torch.no_grad():
        for answer, sign in (([11, 30], 1), ([12, 30], -1)):
            logits = plain(input_ids=torch.tensor([[5, 6, *answer]])).logits[0]
            logp = torch.log_softmax(logits.double(), -1)
            by_hand += sign * sum(float(logp[1 + k, token]) for k, token in enumerate(answer))
    assert stats["margin"].mean == pytest.approx(by_hand, abs=1e-4)
    assert stats["loss"].mean == pytest.approx(math.log1p(math.exp(-by_hand)), abs=1e-4)


def test_a_cut_answer_is_counted_and_keeps_its_own_length(tiny_tokenizer: Any, tmp_path: Path) -> None:
    rows = [row("one", chosen="x" * 40), row("two")]
    found = prepared(tmp_path, tiny_tokenizer, rows, max_response_tokens=10, too_long="truncate")
    report = {finding.kind: finding for finding in found.preflight.findings}
    assert report["response_over_length"].rows == ("1",)
    assert report["without_eos"].count == 1
    assert int(found.train.chosen.response_lens.max()) <= 10
    loss = preference_loss(dpo_kit.config(loss="simpo").dpo)
    logp = torch.full((int(found.train.sequences.response_lens.sum()),), -0.5)
    items, stats = loss.items(Outputs(logp=logp), found.train)  # type: ignore[union-attr]
    assert stats["reward_chosen"].mean == pytest.approx(-0.05), "a mean over the tokens that are there"
    assert bool(items.isfinite().all())


def test_empty_answers_never_reach_a_loss(tiny_tokenizer: Any, tmp_path: Path) -> None:
    rows = [row("one", chosen=" "), row("two", rejected=""), row("three")]
    found = prepared(tmp_path, tiny_tokenizer, rows)
    (finding,) = [f for f in found.preflight.findings if f.kind == "empty_response"]
    assert (finding.count, finding.action, finding.rows) == (2, "dropped", ("1", "2"))
    assert len(found.train) == 1
    for side in (found.train.chosen, found.train.rejected):
        assert all(bool(flags.any()) for flags in side.trained.rows())


def test_an_answer_without_trained_tokens_stops_the_update_with_its_number(tiny_llama_folder: Path) -> None:
    chosen = Sequences.build([[5], [6]], [[11, 12], [13]], [[True, True], [False]])
    batch = Pairs(chosen, Sequences.build([[5], [6]], [[21], [22]]), torch.zeros(2), ("a", "b"))
    engine = dpo_kit.engine(tiny_llama_folder, 100)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    with pytest.raises(TrainingError, match="1"):
        engine.step(batch, preference_loss(dpo_kit.config(loss="simpo").dpo))
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())


def test_a_policy_changed_in_memory_before_training_starts_at_log_two(tiny_llama_folder: Path) -> None:
    """The reference is the policy as it is when training begins, not what its folder holds."""
    engine = dpo_kit.engine(tiny_llama_folder, 100)
    folder = engine.snapshot()
    with torch.no_grad():
        for parameter in engine.model.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = dpo_kit.pairs(dpo_kit.settings_for("simpo"))
    loss = preference_loss(dpo_kit.config().dpo)
    reference = engine.snapshot().logprobs(batch.sequences, 1.0)
    stats = engine.step(batch.adding(ref_logp=reference), loss)
    assert stats["loss"].mean == pytest.approx(math.log(2), abs=1e-6)
    stale = folder.logprobs(batch.sequences, 1.0)
    assert abs(engine.evaluate(batch.adding(ref_logp=stale), loss)["loss"].mean - math.log(2)) > 1e-2


def test_the_lora_reference_is_the_base_whatever_the_adapter_has_learned(tiny_llama_folder: Path) -> None:
    from tutelage.config.common import ModelConfig, OptimConfig
    from tutelage.engines.engine import ModelEngine
    from tutelage.models.load import load_causal_lm
    from tutelage.roles.reference import Reference

    model = load_causal_lm(ModelConfig(path=str(tiny_llama_folder), lora_rank=4))
    engine = ModelEngine(model, OptimConfig(lr=5e-2, schedule="constant"))
    reference, base = Reference(engine, 1.0, adapter=False), dpo_kit.engine(tiny_llama_folder, 1000)
    batch, loss = dpo_kit.pairs(dpo_kit.settings_for("simpo")), preference_loss(dpo_kit.config().dpo)
    wanted = base.logprobs(batch.sequences, 1.0).flat
    for _ in range(3):
        column = reference.logprobs(batch)
        torch.testing.assert_close(column.flat, wanted, rtol=1e-5, atol=1e-5)
        engine.step(batch.adding(ref_logp=column), loss)
    assert float((engine.logprobs(batch.sequences, 1.0).flat - wanted).abs().max()) > 1e-2
