"""The FLOP count of the benchmarks by hand and against what torch multiplied; every stage runs. Nothing is timed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import counting
import measure
import native_kernels
import stages
import workload

from tutelage.models import half_row, packed_products
from tutelage.native import build, ops

SIZES = workload.Sizes(
    sequences=4, prompt=(3, 5), response=(2, 6), new_tokens=3, ragged=(4, 12), ragged_sequences=4, seed=1
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> workload.Workload:
    folder = workload.build_tiny_folder(tmp_path_factory.mktemp("tiny"), hidden=64, layers=1)
    return workload.Workload(folder, SIZES)


def multiplied(run: Callable[[], object]) -> int:
    """FLOPs of all products of two matrices in a run, as torch's dispatcher saw them."""
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    seen: dict[Any, int] = counter.get_flop_counts()["Global"]
    return sum(count for op, count in seen.items() if op == torch.ops.aten.mm)


def test_weights_of_a_llama_with_shared_keys_by_hand() -> None:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    # q 8x8, k and v 8x4 each, o 8x8, three MLP matrices of 8x16: 64 + 64 + 64 + 384 = 576 a layer; head 11x8.
    assert counting.count_weights(model.model, model.lm_head) == counting.Weights(trunk=1152, head=88)
    assert counting.count_weights(model.model, None).head == 0


def test_position_embeddings_and_biases_are_not_multiplied() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=32, n_embd=8, n_layer=3, n_head=2))
    # 12 H^2 a layer: 3 for q, k, v, 1 for the output, 8 for the MLP.
    assert counting.count_weights(model.transformer, model.lm_head) == counting.Weights(trunk=3 * 12 * 64, head=88)


def test_flops_by_hand() -> None:
    weights = counting.Weights(trunk=10, head=7)
    assert counting.forward_flops(weights, tokens=9, head_positions=4) == 2 * 10 * 9 + 2 * 7 * 4 == 236
    assert counting.update_flops(weights, tokens=9, head_positions=4) == 708
    # 2 prompts of 2 and 3 tokens, 2 tokens sampled of each: prefill 100 + 28, one decode step of both 40 + 28;
    # 9 tokens in all: policy and reference 236 each, critic and reward model 180 each; updates of 708 and 540.
    expected = 128 + 68 + 2 * 236 + 2 * 180
    assert counting.ppo_step_flops(weights, [2, 3], new_tokens=2, epochs=1) == expected + 708 + 540
    assert counting.ppo_step_flops(weights, [2, 3], new_tokens=2, epochs=3) == expected + 3 * (708 + 540)


def test_a_product_by_hand() -> None:
    product = measure.Multiply(2, 3, 4, "float32")
    assert product.flops == multiplied(lambda: product.left @ product.right) == 48


def test_padding_by_hand() -> None:
    assert counting.padding_share([2, 6, 4]) == pytest.approx(1 / 3)  # 12 real tokens in 18 places
    # trunk alone: 18 / 12; with an output layer on 5 positions (360 + 70) / (240 + 70)
    assert counting.predicted_padding_ratio(counting.Weights(10, 0), [2, 6, 4], 5) == pytest.approx(1.5)
    assert counting.predicted_padding_ratio(counting.Weights(10, 7), [2, 6, 4], 5) == pytest.approx(430 / 310)


@pytest.mark.parametrize("name", ["sft", "actor", "sft_packed"])
def test_an_update_multiplies_what_was_counted_and_the_output_layer_once_more(
    name: str, work: workload.Workload
) -> None:
    stage = workload.STAGES[name](work)
    batch = work.ragged_demonstrations() if name == "sft_packed" else work.demonstrations()
    again = 2 * work.weights.head * int(batch.sequences.response_lens.sum())
    assert multiplied(stage.run) == stage.flops + again


@pytest.mark.parametrize("name", ["prefill", "logprobs"])
def test_a_forward_stage_multiplies_what_was_counted(name: str, work: workload.Workload) -> None:
    stage = workload.STAGES[name](work)
    assert multiplied(stage.run) == stage.flops


def test_decoding_is_a_generation_less_its_prefill(work: workload.Workload) -> None:
    stage = workload.STAGES["decode"](work)
    assert stage.less is not None
    assert multiplied(stage.run) - multiplied(stage.less) == stage.flops


def test_a_ppo_step_multiplies_what_was_counted(work: workload.Workload) -> None:
    stage = workload.STAGES["ppo_step"](work)
    responses = SIZES.sequences * SIZES.new_tokens
    output_layer_again = 2 * work.weights.head * responses
    critic_head_backward = 2 * 2 * 64 * responses  # its forward is an addmm, which `multiplied` leaves out
    assert multiplied(stage.run) == stage.flops + output_layer_again + critic_head_backward


def test_padded_rows_give_the_loss_of_packed_ones_with_the_work_of_the_padding(work: workload.Workload) -> None:
    batch, loss = work.ragged_demonstrations(), workload.SFTLoss("token_mean")
    packed = work.policy.evaluate(batch, loss)["loss"].mean
    with workload.padded_layout(work.language_model.trunk):
        assert work.policy.evaluate(batch, loss)["loss"].mean == pytest.approx(packed, abs=1e-5)
    assert work.policy.evaluate(batch, loss)["loss"].mean == packed
    lens = batch.sequences.tokens.lens.tolist()
    fast, slow = (multiplied(workload.STAGES[name](work).run) for name in ("sft_packed", "sft_padded"))
    assert slow - fast == 3 * 2 * work.weights.trunk * (len(lens) * max(lens) - sum(lens))


def test_every_stage_runs_in_turn_and_the_logits_are_those_of_responses(work: workload.Workload) -> None:
    every = [build(work) for build in workload.STAGES.values()]
    probe = measure.Multiply(8, 8, 8, "float32")
    work.largest_logits[:] = 0, 0
    timings, rates = measure.interleaved(every, probe, repeat=2)
    assert set(timings) == set(workload.STAGES)
    assert all(len(t.elapsed) == len(t.processor) == 2 for t in timings.values())
    assert len(rates) == 2 * len(every)
    responses = [int(b.sequences.response_lens.sum()) for b in (work.demonstrations(), work.ragged_demonstrations())]
    assert work.largest_logits == [max(*responses, SIZES.sequences * SIZES.new_tokens), work.config.vocab_size]


def test_the_clock_that_counts_and_the_cores_in_use() -> None:
    timing = measure.Timing("processor", elapsed=[4.0, 2.0, 10.0], processor=[2.0, 1.0, 5.0])
    assert timing.median == 2.0
    assert measure.Timing("elapsed", timing.elapsed, timing.processor).median == 4.0
    assert timing.cores == 0.5


def test_memory_is_measured_in_a_process_of_its_own(work: workload.Workload) -> None:
    memory = measure.stage_memory("logprobs", Path(work.model_cfg.path), SIZES, "float32", threads=1)
    assert 0 < memory.imports < memory.peak


def test_the_command_prints_a_row_for_each_stage_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "SQUARE", 64)
    asked = ["--stage", "prefill", "--stage", "critic", "--repeat", "1", "--sequences", "2", "--no-memory"]
    stages.main([*asked, "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == [
        "| stage",
        "| ---",
        "| prefill",
        "| critic",
    ]
    with pytest.raises(SystemExit, match="no-such-folder"):
        stages.main([*asked, "--model", "./no-such-folder"])


def test_each_setting_of_the_kernels_benchmark_leaves_out_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts", "2", "--groups", "1", "--samples", "2", "--prompt-tokens", "6", "--new-tokens", "32"]
    calls: dict[str, set[str]] = {}
    real = native_kernels.within

    def within(setting: str) -> Any:
        stack, seen = real(setting), calls.setdefault(setting, set())
        for module, name in ((half_row, "row_attention"), (packed_products, "_forward")):
            noted = functools.partial(_noted, seen, name, getattr(module, name))
            stack.enter_context(patch.object(module, name, noted))
        call = ops._call
        stack.enter_context(patch.object(ops, "_call", lambda name, *rest: _noted(seen, name, call, name, *rest)))
        return stack

    with patch.object(native_kernels, "within", within):
        native_kernels.main(["--repeat", "1", *sizes])
    assert capsys.readouterr().out.count("\n| ") == 5
    has_kernels, has_order = build.kernels().library is not None, packed_products._supported()
    assert calls["torch"] == set()
    assert calls["together"] == {"row_attention"}
    assert ("paged_attention" in calls["kernels"]) == ("rms_norm_back" in calls["kernels"]) == has_kernels
    assert calls["ordered"] == calls["kernels"] | ({"_forward"} if has_order else set())


def _noted(seen: set[str], name: str, call: Callable[..., Any], *given: Any) -> Any:
    seen.add(name)
    return call(*given)
