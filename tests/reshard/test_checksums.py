"""Digests do not depend on the layout, and change with one bit, one place, one replica."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_kit import TINY, full_tensor, full_tensors, sliced
from spmd_kit import run_ranks

from tutelage.errors import TrainingError
from tutelage.layout import Layout
from tutelage.transport.weights import checksums as module
from tutelage.transport.weights.boxes import Block, Box, Weight, one_block, whole
from tutelage.transport.weights.checksums import checksum, checksums, verify
from tutelage.transport.weights.llama import llama_cuts, llama_weights
from tutelage.transport.weights.moving import move
from tutelage.transport.weights.placements import Cut, placed, whole_on
from tutelage.transport.weights.planning import plan

MASK = (1 << 64) - 1


def by_hand(values: torch.Tensor) -> int:
    """The digest in Python's integers, element by element, from its definition."""
    width = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[values.element_size()]
    total = 0
    for position, bits in enumerate(values.reshape(-1).view(getattr(torch, width)).tolist()):
        x = position * -7046029254386353131 + bits * -4658895280553007687 + 7809847782465536322
        x = ((x ^ ((x & MASK) >> 30)) * -4658895280553007687) & MASK
        x = ((x ^ (x >> 27)) * -7723592293110705685) & MASK
        total += x ^ (x >> 31)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def of_whole(tensor: torch.Tensor) -> int:
    return checksum(tensor, one_block(whole(tensor.shape)), tensor.shape)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int8", "bool"])
def test_the_digest_by_hand(dtype: str) -> None:
    tensor = (torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0)) * 3).to(getattr(torch, dtype))
    assert of_whole(tensor) == by_hand(tensor)
    assert of_whole(torch.tensor(1.5)) == by_hand(torch.tensor([1.5]))


def test_long_weights_are_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = full_tensor("w", Weight((37, 5)))
    expected = of_whole(tensor)
    monkeypatch.setattr(module, "CHUNK", 16)
    assert of_whole(tensor) == expected == by_hand(tensor)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_parts_add_up(data: st.DataObject) -> None:
    tensor = full_tensor("w", Weight((7, 6)))
    rows, columns = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 6))
    boxes: list[Box] = [
        (r, c) for r in ((0, rows), (rows, 7)) for c in ((0, columns), (columns, 6)) if r[0] < r[1] and c[0] < c[1]
    ]
    total = sum(checksum(tensor[tuple(slice(*edge) for edge in box)], one_block(box), (7, 6)) for box in boxes)
    assert (total - of_whole(tensor)) % (1 << 64) == 0
    assert (sum(checksum(tensor, one_block(((0, 7), (0, 6))), (7, 6), [box]) for box in boxes) - total) % (1 << 64) == 0


def test_one_bit_one_swap_one_shift_are_seen() -> None:
    tensor = full_tensor("w", Weight((6, 4)))
    digest = of_whole(tensor)
    negative = tensor.clone()
    negative[0, 0] = 0.0
    zero = negative.clone()
    zero[0, 0] = -0.0
    swapped = tensor[[1, 0, 2, 3, 4, 5]]
    digests = {
        digest,
        of_whole(negative),
        of_whole(zero),
        of_whole(swapped),
        of_whole(tensor.T.contiguous().view(6, 4)),
    }
    assert len(digests) == 5
    moved = checksum(tensor[:3], (Block(((3, 6), (0, 4)), (0, 0)),), (6, 4))
    assert moved != checksum(tensor[:3], one_block(((0, 3), (0, 4))), (6, 4))


def layouts_rank(rank: int, world: int) -> list[dict[str, int]]:
    weights = llama_weights(TINY, "bfloat16")
    full = full_tensors(weights)
    found = []
    layouts = (
        Layout(shard=4),
        Layout(shard=2, tensor=2),
        Layout(pipeline=2, tensor=2),
        Layout(replicate=2, shard=2),
        Layout(replicate=4),
    )
    for layout in layouts:
        placement = placed(weights, layout, llama_cuts(weights, pipeline=layout.pipeline))
        found.append(checksums(sliced(full, placement, rank), placement, weights))
    return [*found, {name: of_whole(full[name]) for name in sorted(weights)}]


def test_every_layout_has_the_digests_of_one_process() -> None:
    for found in run_ranks(layouts_rank, 4):
        assert all(digests == found[-1] for digests in found)


def verify_rank(rank: int, world: int) -> list[str]:
    weights = llama_weights(TINY)
    full = full_tensors(weights)
    source = placed(weights, Layout(shard=4), llama_cuts(weights))
    target = placed(weights, Layout(replicate=2, tensor=2), llama_cuts(weights))
    local = sliced(full, source, rank)
    moved = move(plan(source, target, weights), local).tensors
    assert verify((local, source), (moved, target), weights) == {n: of_whole(full[n]) for n in sorted(weights)}
    name, said = "model.layers.2.mlp.down_proj.weight", []
    if rank == 1:
        moved[name][3, 2] += 1e-6
    said.append(refusal(lambda: verify((local, source), (moved, target), weights)))
    if rank == 3:
        moved[name][3, 2] += 1e-6
    said.append(refusal(lambda: verify((local, source), (moved, target), weights)))
    return said


def refusal(run: object) -> str:
    with pytest.raises(TrainingError) as error:
        run()  # type: ignore[operator]
    return error.value.what


def test_a_changed_weight_is_named_on_all_ranks() -> None:
    for said in run_ranks(verify_rank, 4):
        assert said[0] == (
            "ranks 1 and 3 hold the same slice of model.layers.2.mlp.down_proj.weight with different values"
        )
        assert said[1] == (
            "1 of 39 weights differ between source and target, first model.layers.2.mlp.down_proj.weight"
        )


def overlap_rank(rank: int, world: int) -> dict[str, int]:
    """Rank 0 holds the upper rows, rank 1 all: each element counts once."""
    weights = {"w": Weight((5, 3)), "b": Weight(())}
    full = full_tensors(weights)
    cut = placed(weights, Layout(shard=2), {"w": Cut(), "b": Cut()})
    placement = {0: cut[0], 1: whole_on(weights, (1,))[1]}
    assert checksums(sliced(full, placement, rank), placement, weights) == {n: of_whole(full[n]) for n in ("b", "w")}
    return checksums({"w": full["w"]}, whole_on({"w": weights["w"]}, (1,)), weights)


def test_overlapping_slices_count_once() -> None:
    first, second = run_ranks(overlap_rank, 2)
    assert first == second == {"w": of_whole(full_tensor("w", Weight((5, 3))))}
