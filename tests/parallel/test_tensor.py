"""Matrices cut over tensor ranks give what one process gives: numbers, and gradients by every weight."""

from __future__ import annotations

from functools import cache
from typing import Any

import parallel_kit as kit
import pytest
import tensor_kit
import torch
from spmd_kit import run_ranks
from transformers import GPT2Config, Phi3Config

from tutelage.models.parallel.tensor import PLANS, tensor_obstacle


@cache
def one_process(name: str) -> Any:
    make, work, rows = tensor_kit.CASES[name]
    return kit.run(make(), work, kit.sequences(rows))


def test_numbers_and_gradients_equal_one_process():
    for rank, found in enumerate(run_ranks(tensor_kit.every_case, 2)):
        for name, (*ours, notes) in found.items():
            kit.require_equal(tuple(ours), one_process(name), f"rank {rank}, {name}")
            whole = name.startswith("odd vocabulary")
            assert [("97 embeddings" in note) for note in notes] == ([True] if whole else []), name


def test_every_plan_is_among_the_cases_and_agrees_with_that_of_transformers():
    """Where transformers has names for what we do: colwise, rowwise, and a whole norm whose gradients are summed."""
    style = {"column": "colwise", "row": "rowwise", "norm": "replicated_with_grad_allreduce"}
    for kind, plan in PLANS.items():
        theirs = kit.MAKERS[kind][0].base_model_tp_plan
        assert {f"layers.*.{name}": style[how] for name, how in plan.items()} == theirs, kind
        make = next(make for name, (make, _, _) in tensor_kit.CASES.items() if name.split()[0] == kind)
        assert make().model.config.model_type == kind


def test_fsdp_outside_and_tensor_inside_equal_one_process():
    for rank, found in enumerate(run_ranks(tensor_kit.sharded_and_cut, 4)):
        assert set(found) == set(tensor_kit.SHARDED)
        for name, ours in found.items():
            kit.require_equal(ours, one_process(name), f"rank {rank}, {name}")


@pytest.mark.parametrize("axis", ["sequence", "context"])
def test_rows_cut_outside_and_matrices_inside_equal_one_process(axis):
    for rank, found in enumerate(run_ranks(tensor_kit.cut_both_ways, 4, axis)):
        for name, ours in found.items():
            kit.require_equal(ours, one_process(name), f"rank {rank}, {name}")


def test_generation_is_that_of_one_process_token_for_token():
    first, second = run_ranks(tensor_kit.generate, 2)
    for name, make in tensor_kit.GENERATED.items():
        rows, logp = tensor_kit.generated(make())
        assert len({tuple(row) for row in rows}) > 6, "the control: samples differ"
        assert first[name][0] == second[name][0] == rows, name
        assert torch.equal(first[name][1], second[name][1]), name
        torch.testing.assert_close(first[name][1], logp, atol=2e-5, rtol=0)


def test_a_softmax_over_slices_equals_the_whole_one_in_float64():
    generator = torch.Generator().manual_seed(0)
    logits_rV = 3 * torch.randn(6, 11, dtype=torch.float64, generator=generator)
    logits_rV[2, 3], logits_rV[4, 0] = -torch.inf, 500.0
    targets_r = torch.tensor([0, 10, 6, 7, 0, 3])
    whole_rV = torch.log_softmax(logits_rV, -1)
    p_rV, finite_rV = whole_rV.exp(), whole_rV.masked_fill(whole_rV.isinf(), 0.0)
    logp_r, entropy_r = whole_rV[torch.arange(6), targets_r], -(p_rV * finite_rV).sum(-1)
    # d logp / d z_k = 1[k is the target] - p_k, d entropy / d z_k = - p_k (log p_k + entropy)
    one_rV = torch.nn.functional.one_hot(targets_r, 11).double()
    expected = (one_rV - p_rV - 2 * p_rV * (finite_rV + entropy_r[:, None])) * torch.arange(1.0, 7.0)[:, None]
    for rank, (logp, entropy, grad) in enumerate(
        run_ranks(tensor_kit.sliced_softmax, 2, logits_rV, targets_r, [7, 11])
    ):
        torch.testing.assert_close(logp, logp_r, atol=1e-12, rtol=0)
        torch.testing.assert_close(entropy, entropy_r, atol=1e-12, rtol=0)
        torch.testing.assert_close(grad, expected[:, 7 * rank : 7 + 4 * rank], atol=1e-12, rtol=0)


def test_what_cannot_be_cut_is_refused_on_every_rank_with_the_model_untouched():
    for said in run_ranks(tensor_kit.refusals, 2):
        assert len(said) == 1
        assert "2 tensor ranks do not divide 1 (key/value heads) of this llama model; 1 would" in said[0]


@pytest.mark.parametrize(
    ("changes", "size", "sequence", "words"),
    [
        ({}, 1, 1, None),
        ({}, 2, 2, None),
        ({}, 4, 1, "4 tensor ranks do not divide 2 (key/value heads) of this llama model; 1 or 2 would"),
        ({"intermediate_size": 99}, 2, 1, "2 tensor ranks do not divide 99 (intermediate size)"),
        ({"num_key_value_heads": 4}, 3, 1, "do not divide 4 (attention heads) and 4 (key/value heads)"),
        ({"num_key_value_heads": 4}, 3, 1, "1, 2 or 4 would"),
        ({}, 2, 4, "4 attention heads, 2 on each of 2 tensor ranks: 4 sequence ranks do not divide them"),
    ],
)
def test_the_obstacle_says_which_sizes_would_do(changes, size, sequence, words):
    found = tensor_obstacle(kit.config("llama", **changes), size, sequence)
    assert found is words is None or (words is not None and words in found)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2Config(), "gpt2 cannot be cut over tensor ranks: its query, key and value are one matrix"),
        (Phi3Config(), "phi3 cannot be cut over tensor ranks: its query, key and value are one matrix"),
        (kit.config("bert"), "bert has no tensor-parallel plan; gemma"),
    ],
)
def test_an_architecture_without_a_plan_is_refused_with_a_reason(config, words):
    assert words in tensor_obstacle(config, 2)


def test_a_model_without_storage_is_cut_before_its_weights_are_read():
    for shapes in run_ranks(tensor_kit.cut_without_storage, 2):
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32, 64)
        assert shapes["model.layers.1.self_attn.o_proj.weight"] == (64, 32)
        assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 48)
        assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (48, 64)
        assert shapes["model.norm.weight"] == (64,)
