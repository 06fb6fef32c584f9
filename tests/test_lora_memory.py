"""Peak memory of PPO on one base, against full SFT and against copies: measured in processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import lora_memory
import workload

WORK = lora_memory.Work(sequences=2, prompt=8, new_tokens=8, budget=32, rank=8)


def test_the_predicted_bytes_by_hand(tmp_path: Path) -> None:
    """Hidden 64, one block: q, k, v, o of 64 x 64 and three MLP matrices of 64 x 192; an adapter has r (in + out)."""
    folder = workload.build_tiny_folder(tmp_path / "model", hidden=64, layers=1)
    weights = lora_memory.counted(folder, 2)
    assert weights.adapter == 2 * (4 * 128 + 3 * 256)
    assert weights.base == sum(w.numel() for w in load_file(folder / "model.safetensors").values())
    base, adapter = weights.base, weights.adapter
    assert lora_memory.predicted("sft", weights) == 16 * base
    assert lora_memory.predicted("full", weights) == 36 * base
    assert lora_memory.predicted("copies", weights) == 12 * base + 28 * adapter
    assert lora_memory.predicted("shared", weights) == 4 * base + 32 * adapter
    linear = 4 * 64 * 64 + 3 * 64 * 192
    assert weights.linear == linear
    bits = 4 + 1 / 8 + 1 / 512
    assert lora_memory.predicted("packed", weights) == round(4 * (base - linear) + linear * bits / 8 + 32 * adapter)


def test_every_case_takes_its_steps(tmp_path: Path) -> None:
    folder = workload.build_tiny_folder(tmp_path / "model", hidden=64, layers=1)
    for case in lora_memory.CASES:
        reward = lora_memory.reward_folder(folder, tmp_path / case, WORK.rank, packed=case == "packed")
        found = lora_memory.own_memory(case, str(folder), str(reward), WORK)
        assert 2 * 8 < found.tokens <= 2 * 16
        assert found.imports <= found.step <= found.exported


@pytest.mark.slow
def test_ppo_on_one_base_takes_less_than_full_sft_and_far_less_than_copies(tmp_path: Path) -> None:
    """47 million weights (190 MB), so that activations of 32 tokens and the allocator's slack are small beside them."""
    folder = workload.build_tiny_folder(tmp_path / "model", hidden=768, layers=6)
    weights = lora_memory.counted(folder, WORK.rank)
    found = {}
    for case in lora_memory.CASES:
        reward = lora_memory.reward_folder(folder, tmp_path / case, WORK.rank, packed=case == "packed")
        found[case] = lora_memory.measured(case, folder, reward, WORK)
    # on a CPU loading in float32, and bitsandbytes' work in packing, are the peak of the packed base at this size
    assert found["packed"].own < found["copies"].own
    assert found["shared"].own < found["sft"].own
    assert 2.5 * found["shared"].own < found["full"].own
    assert found["shared"].own < found["copies"].own
    # the state is there: a measured peak below it would mean that the wrong process was measured
    assert all(found[case].own > 0.9 * lora_memory.predicted(case, weights) for case in found)
    assert found["shared"].exported - found["shared"].imports < found["sft"].own
