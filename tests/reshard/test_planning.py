"""Plans cover every target element once, from ranks that hold it; nearest first, shared among holders."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_kit import TINY, marks, missing_bytes

from tutelage.errors import ConfigError, ShapeError
from tutelage.layout import Layout
from tutelage.transport.weights.boxes import Block, Placement, Weight, difference, one_block, outside, volume, whole
from tutelage.transport.weights.llama import llama_cuts, llama_weights
from tutelage.transport.weights.placements import Cut, chunk, on_ranks, placed, whole_on
from tutelage.transport.weights.planning import Plan, across_nodes, plan
from tutelage.transport.weights.rounds import Transfer, pieces, rounds

MATRIX = {"w": Weight((8, 6))}


def rows(*intervals: tuple[int, int], columns: int = 6) -> Placement:
    return {rank: {"w": one_block((interval, (0, columns)))} for rank, interval in enumerate(intervals)}


def check_plan(made: Plan) -> None:
    """Element by element, with tensors: nothing of the planner's own arithmetic."""
    for name, weight in made.weights.items():
        arrived = {rank: torch.zeros(weight.shape, dtype=torch.int64) for rank in made.target}
        for transfer in (*made.transfers, *made.kept):
            if transfer.name != name:
                continue
            part = tuple(slice(start, stop) for start, stop in transfer.box)
            assert bool((marks(made.source, made.weights, transfer.src, name)[part] == 1).all()), (
                "not held by the source"
            )
            assert transfer.nbytes == torch.zeros(weight.shape)[part].numel() * weight.itemsize
            arrived[transfer.dst][part] += 1
        for rank, count in arrived.items():
            assert torch.equal(count, marks(made.target, made.weights, rank, name)), "not covered exactly once"
    assert all(transfer.src != transfer.dst for transfer in made.transfers)
    for rank in made.target:
        assert made.received.get(rank, 0) == missing_bytes(made.source, made.target, made.weights, rank)


def test_hand_computed_two_rows_shards_to_whole_on_rank_two() -> None:
    made = plan(rows((0, 4), (4, 8)), {2: {"w": one_block(whole((8, 6)))}}, MATRIX)
    assert [(t.src, t.dst, t.box, t.nbytes) for t in made.transfers] == [
        (0, 2, ((0, 4), (0, 6)), 96),
        (1, 2, ((4, 8), (0, 6)), 96),
    ]
    assert not made.kept


def test_a_rank_receives_only_what_it_lacks() -> None:
    made = plan(rows((0, 4), (4, 8)), {0: {"w": one_block(((2, 6), (0, 6)))}}, MATRIX)
    assert [(t.src, t.box) for t in made.transfers] == [(1, ((4, 6), (0, 6)))]
    assert [(t.dst, t.box) for t in made.kept] == [(0, ((2, 4), (0, 6)))]


def test_the_same_node_is_asked_first() -> None:
    source = {0: rows((0, 8))[0], 1: rows((0, 8))[0]}
    target = {2: rows((0, 8))[0], 3: rows((0, 8))[0]}
    nodes = {0: "a", 1: "b", 2: "b", 3: "b"}
    made = plan(source, target, MATRIX, nodes)
    assert [t.src for t in made.transfers] == [1, 1]
    assert across_nodes(made, nodes) == 0
    assert sorted(t.src for t in plan(source, target, MATRIX).transfers) == [0, 1]
    # Rank 4 is on no node that is known: it is served by whoever has sent least.
    assert plan(source, {4: rows((0, 8))[0]}, MATRIX, {0: "a", 1: "a"}).transfers[0].src == 0


def test_replicas_serve_evenly() -> None:
    weights = {f"w{i}": Weight((8, 6)) for i in range(12)}
    made = plan(whole_on(weights, (0, 1, 2)), whole_on(weights, (3,)), weights)
    assert dict(made.sent) == {0: 4 * 192, 1: 4 * 192, 2: 4 * 192}


def test_large_slices_are_spread_before_small_ones() -> None:
    weights = {"small": Weight((1,)), "also": Weight((2,)), "large": Weight((3,))}
    made = plan(whole_on(weights, (0, 1)), whole_on(weights, (2,)), weights)
    assert dict(made.sent) == {0: 12, 1: 12}


def test_what_no_rank_holds_is_named() -> None:
    with pytest.raises(ShapeError, match=r"rank 3 needs w\[4:8, 0:6\], which no source rank holds"):
        plan(rows((0, 4)), {3: {"w": one_block(whole((8, 6)))}}, MATRIX)
    weights = {"head.weight": Weight((4,)), "heads.weight": Weight((4,))}
    with pytest.raises(ShapeError, match=r"Did you mean head\.weight"):
        plan(
            {0: {"head.weight": one_block(((0, 4),))}},
            {1: {"heads.weight": one_block(((0, 4),))}},
            weights,
        )


def test_wrong_placements_are_refused() -> None:
    good = rows((0, 8))
    with pytest.raises(ShapeError, match="not a slice of shape"):
        plan(rows((0, 9)), good, MATRIX)
    with pytest.raises(ShapeError, match=r"'v', which is not a weight of this model"):
        plan({0: {"v": one_block(((0, 1),))}}, good, MATRIX)
    overlapping = (Block(((0, 4), (0, 6)), (0, 0)), Block(((2, 6), (0, 6)), (4, 0)))
    with pytest.raises(ShapeError, match="leave holes in the local tensor or overlap"):
        plan({0: {"w": overlapping}}, good, MATRIX)
    with pytest.raises(ShapeError, match="leave holes"):
        plan({0: {"w": (Block(((0, 4), (0, 6)), (2, 0)),)}}, good, MATRIX)
    with pytest.raises(ShapeError, match=r"dtype 'float31'.*Did you mean float32"):
        Weight((1,), "float31")
    with pytest.raises(ConfigError, match="stage 2 of 2"):
        placed(MATRIX, Layout(pipeline=2), {"w": Cut(stages=(2,))})


@pytest.mark.parametrize("size", [1, 2, 5, 7, 8, 13])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_chunks_are_those_of_torch(size: int, count: int) -> None:
    expected = [part.tolist() for part in torch.arange(size).chunk(count)]
    expected += [[]] * (count - len(expected))
    assert [list(range(*chunk((0, size), count, index))) for index in range(count)] == expected


def test_fsdp_cuts_the_slice_of_tensor_parallel() -> None:
    held = placed(MATRIX, Layout(shard=2, tensor=2), {"w": Cut(tensor=0)})
    # ranks: (shard, tensor) = (0, 0), (0, 1), (1, 0), (1, 1); tensor parallel halves are rows 0-3 and 4-7.
    assert [held[rank]["w"][0].box[0] for rank in range(4)] == [(0, 2), (4, 6), (2, 4), (6, 8)]
    columns = placed(MATRIX, Layout(shard=2, tensor=2), {"w": Cut(tensor=1)})
    assert columns[3]["w"][0].box == ((4, 8), (3, 6))
    assert on_ranks(columns, {0: 4, 1: 5, 2: 6, 3: 7})[7] == columns[3]


def test_stages_hold_their_blocks_alone() -> None:
    weights = llama_weights(TINY)
    held = placed(weights, Layout(pipeline=2), llama_cuts(weights, pipeline=2))
    first, last = (
        {name.split(".")[2] if "layers" in name else name.split(".")[-2] for name in held[rank]} for rank in (0, 1)
    )
    assert first == {"embed_tokens", "0", "1"}
    assert last == {"2", "3", "norm", "lm_head"}


def test_a_plan_has_a_fingerprint() -> None:
    source, target = rows((0, 4), (4, 8)), {2: {"w": one_block(whole((8, 6)))}}
    made = plan(source, target, MATRIX)
    assert made.fingerprint == plan(source, target, MATRIX).fingerprint
    assert made.fingerprint != plan(source, target, {"w": Weight((8, 6), "int32")}).fingerprint
    assert made.fingerprint != plan(source, on_ranks(target, {2: 3}), MATRIX).fingerprint


layouts = st.sampled_from(
    [
        Layout(),
        Layout(shard=2),
        Layout(shard=3),
        Layout(shard=4),
        Layout(replicate=2, shard=2),
        Layout(tensor=2),
        Layout(tensor=4),
        Layout(shard=2, tensor=2),
        Layout(pipeline=2, tensor=2),
        Layout(pipeline=2, shard=3),
        Layout(pipeline=2, replicate=2, shard=2, tensor=2),
    ]
)
names = st.integers(1, 5)


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Weight], dict[str, Cut]]:
    weights, cuts = {}, {}
    for index in range(draw(names)):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
        weights[f"w{index}"] = Weight(shape, draw(st.sampled_from(["float32", "bfloat16"])))
        dims = st.integers(0, len(shape) - 1) if shape else st.just(0)
        cuts[f"w{index}"] = Cut(draw(st.one_of(st.none(), dims)) if shape else None, draw(dims))
    return weights, cuts


@settings(max_examples=120, deadline=None)
@given(models(), layouts, layouts, st.integers(0, 8), st.sampled_from([None, 1, 2, 4]))
def test_any_two_layouts(
    model: tuple[dict[str, Weight], dict[str, Cut]], before: Layout, after: Layout, shift: int, per_node: int | None
) -> None:
    weights, cuts = model
    target = on_ranks(placed(weights, after, cuts), {rank: rank + shift for rank in range(after.size)})
    nodes = None if per_node is None else {rank: rank // per_node for rank in range(32)}
    staged = {name: dataclasses.replace(cut, stages=None) for name, cut in cuts.items()}
    check_plan(plan(placed(weights, before, staged), target, weights, nodes))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_overlapping_source_boxes(data: st.DataObject) -> None:
    """Ranks hold arbitrary boxes that overlap; together with rank 0, which holds all, they cover the target."""

    def box() -> tuple[tuple[int, int], ...]:
        edges = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in (8, 6)]
        return tuple((low, high) for low, high in edges)

    source: dict[int, dict[str, tuple[Block, ...]]] = {0: {"w": one_block(whole((8, 6)))}}
    source |= {rank: {"w": one_block(box())} for rank in range(1, data.draw(st.integers(1, 5)))}
    target = {rank: {"w": one_block(box())} for rank in range(data.draw(st.integers(1, 6)))}
    check_plan(plan(source, target, MATRIX))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_boxes_are_divided_without_overlap(data: st.DataObject) -> None:
    def box() -> tuple[tuple[int, int], ...]:
        edges = [sorted(data.draw(st.sets(st.integers(0, 5), min_size=2, max_size=2))) for _ in range(3)]
        return tuple((low, high) for low, high in edges)

    target, held = box(), [box() for _ in range(data.draw(st.integers(0, 4)))]
    inside, missing = outside(target, held)
    count = torch.zeros(5, 5, 5, dtype=torch.int64)
    covered = torch.zeros(5, 5, 5, dtype=torch.bool)
    for other in held:
        covered[tuple(slice(*edge) for edge in other)] = True
    for part in (*inside, *missing):
        count[tuple(slice(*edge) for edge in part)] += 1
    expected = torch.zeros(5, 5, 5, dtype=torch.int64)
    expected[tuple(slice(*edge) for edge in target)] = 1
    assert torch.equal(count, expected)
    assert all(bool(covered[tuple(slice(*edge) for edge in part)].all()) for part in inside)
    assert not any(bool(covered[tuple(slice(*edge) for edge in part)].any()) for part in missing)
    assert sum(volume(part) for part in difference(whole((5, 5, 5)), target)) == 125 - volume(target)


@settings(max_examples=80, deadline=None)
@given(models(), layouts, layouts, st.sampled_from([8, 16, 40, 100, 4096]))
def test_rounds_are_bounded_and_lose_nothing(
    model: tuple[dict[str, Weight], dict[str, Cut]], before: Layout, after: Layout, bucket: int
) -> None:
    weights, cuts = model
    made = plan(placed(weights, before, cuts), placed(weights, after, cuts), weights)
    steps = rounds(made.transfers, weights, bucket)
    total: Counter[tuple[int, int, str]] = Counter()
    for step in steps:
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for piece in step.pieces:
            assert weights[piece.name].itemsize == step.itemsize
            assert piece.nbytes == volume(piece.box) * step.itemsize
            out[piece.src] += piece.nbytes
            into[piece.dst] += piece.nbytes
            total[piece.src, piece.dst, piece.name] += piece.nbytes
        assert step.pieces
        assert max(*out.values(), *into.values()) <= bucket // 2
    expected: Counter[tuple[int, int, str]] = Counter()
    for transfer in made.transfers:
        expected[transfer.src, transfer.dst, transfer.name] += transfer.nbytes
    assert total == expected
    assert [len(made.rounds(bucket, rank)) for rank in range(3)] == [len(steps)] * 3


def test_pieces_of_a_box_are_the_box() -> None:
    transfer = Transfer(0, 1, "w", ((2, 7), (1, 5), (0, 3)), 5 * 4 * 3 * 4)
    found = pieces(transfer, 20, 4)
    count = torch.zeros(8, 6, 3, dtype=torch.int64)
    for piece in found:
        assert piece.nbytes == volume(piece.box) * 4 <= 20
        count[tuple(slice(*edge) for edge in piece.box)] += 1
    expected = torch.zeros(8, 6, 3, dtype=torch.int64)
    expected[2:7, 1:5, 0:3] = 1
    assert torch.equal(count, expected)


def test_a_bucket_holds_an_element_each_way() -> None:
    with pytest.raises(ConfigError, match=r"bucket_bytes is 7\n  fix: use at least 8"):
        rounds((), MATRIX, 7)
