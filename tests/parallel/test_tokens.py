"""Rows cut over context and sequence ranks give what one process gives: numbers, and gradients by every weight."""

from __future__ import annotations

from functools import cache
from typing import Any

import parallel_kit as kit
import pytest
import torch
import torch.distributed as dist
from spmd_kit import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from tutelage.errors import ModelError
from tutelage.models.forward import token_logprobs
from tutelage.models.parallel.tokens import TokenParallel, sequence_obstacle, token_parallel
from tutelage.models.probe import choose_layout
from tutelage.types import Ragged


def groups(contexts: int, sequences: int, ring: bool = False) -> TokenParallel:
    found = token_parallel(
        init_device_mesh("cpu", (contexts, sequences), mesh_dim_names=("context", "sequence")), ring=ring
    )
    assert found is not None
    assert (found.contexts, found.sequences, found.size) == (contexts, sequences, contexts * sequences)
    return found


def every_case(rank: int, world: int, contexts: int, sequences: int, ring: bool) -> dict[str, Any]:
    """Each peer divides its loss by the number of peers, and the gradients are summed over them."""
    tokens = groups(contexts, sequences, ring)
    found = {}
    for name, (make, work, rows) in kit.CASES.items():
        numbers, grads = kit.run(kit.over(make(), tokens), work, kit.sequences(rows), divide=world)
        for grad in grads.values():
            dist.all_reduce(grad)
        found[name] = (numbers, grads)
    return found


@cache
def one_process(name: str) -> Any:
    make, work, rows = kit.CASES[name]
    return kit.run(make(), work, kit.sequences(rows))


@pytest.mark.parametrize(
    ("contexts", "sequences", "ring"),
    [
        (1, 2, False),
        (1, 4, False),
        (2, 1, False),
        (4, 1, False),
        (2, 2, False),
        (2, 1, True),
        (4, 1, True),
        (2, 2, True),
    ],
)
def test_numbers_and_gradients_equal_one_process(contexts, sequences, ring):
    world = contexts * sequences
    for rank, found in enumerate(run_ranks(every_case, world, contexts, sequences, ring)):
        for name, ours in found.items():
            kit.require_equal(ours, one_process(name), f"rank {rank}, {name}")


def head_rows(rank: int, world: int, contexts: int, sequences: int) -> tuple[int, torch.Tensor]:
    model, rows = kit.over(kit.language_model(), groups(contexts, sequences)), []
    logits = model.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    model.logits = counted
    with torch.no_grad():
        token_logprobs(model, kit.sequences("uneven"))
        return sum(rows), model.trunk.hidden(kit.sequences("uneven").tokens)


def test_every_response_position_goes_through_the_output_layer_of_one_rank_alone():
    found = run_ranks(head_rows, 4, 2, 2)
    response = sum(r for _, r in kit.UNEVEN)
    assert sum(rows for rows, _ in found) == response
    assert max(rows for rows, _ in found) < response
    expected = kit.language_model().trunk.hidden(kit.sequences("uneven").tokens).detach()
    for _, hidden in found:
        torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=1e-5)


def shares(rank: int, world: int, contexts: int, sequences: int, lens: list[int]) -> tuple[list[int], int]:
    cut = groups(contexts, sequences).cut(Ragged(torch.arange(sum(lens)), torch.tensor(lens)))
    pieces = cut.pieces(True)
    # a query at offset o of its piece looks at o + 1 keys
    work = sum(offset + i + 1 for n, offset in zip(pieces.query_lens, pieces.offsets, strict=True) for i in range(n))
    return cut.index.tolist(), work


def test_a_causal_row_is_cut_into_shares_of_equal_work():
    found = run_ranks(shares, 4, 4, 1, [32])
    # 8 chunks of 4: rank c has chunks c and 7 - c
    assert found[1][0] == [4, 5, 6, 7, 24, 25, 26, 27]
    assert found[3][0] == [12, 13, 14, 15, 16, 17, 18, 19]
    assert [work for _, work in found] == [32 * 33 // 2 // 4] * 4


def test_every_token_is_on_one_rank_and_the_rest_is_filler():
    found = run_ranks(shares, 4, 2, 2, [3, 7, 9])
    assert sorted(i for index, _ in found for i in index) == list(range(24))  # 19 tokens, a multiple of 2 * 2 * 2
    assert {len(index) for index, _ in found} == {6}


def refusals(rank: int, world: int) -> list[str]:
    tokens, said = groups(1, 2), []
    three = kit.language_model(num_attention_heads=3, num_key_value_heads=1, head_dim=16, hidden_size=48)
    with pytest.raises(ModelError) as caught:
        kit.over(three, tokens)
    said.append(str(caught.value))
    padded = choose_layout(kit.build("bert"))
    padded.layout = "padded"
    with pytest.raises(ModelError) as caught:
        type(padded)(padded.model, "padded", False, tokens)
    said.append(str(caught.value))
    return said


def test_what_cannot_be_cut_is_refused_with_numbers_before_anything_runs():
    heads, padded = run_ranks(refusals, 2)[0]
    assert "3 attention heads: 2 sequence ranks do not divide them; 1 or 3 would" in heads
    assert "cannot be packed" in padded


@pytest.mark.parametrize(
    ("heads", "sequence", "tensor", "words"),
    [
        (4, 4, 1, None),
        (6, 4, 1, "6 attention heads: 4 sequence ranks do not divide them; 1, 2, 3 or 6 would"),
        (8, 4, 4, "8 attention heads, 2 on each of 4 tensor ranks: 4 sequence ranks do not divide them; 1 or 2 would"),
        (8, 2, 4, None),
    ],
)
def test_the_obstacle_says_which_sizes_would_do(heads, sequence, tensor, words):
    config = kit.config("llama", num_attention_heads=heads, num_key_value_heads=2, hidden_size=48)
    assert sequence_obstacle(config, sequence, tensor) == words


def test_a_mesh_without_these_axes_cuts_nothing():
    assert run_ranks(no_axes, 1) == [None]


def no_axes(rank: int, world: int) -> TokenParallel | None:
    return token_parallel(init_device_mesh("cpu", (1,), mesh_dim_names=("context",)))
