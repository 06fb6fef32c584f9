"""Bytes of plans against the closed forms, on shapes of real models; hand values; bounds where sizes do not divide."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_kit import TINY

from tutelage.errors import ConfigError
from tutelage.layout import Layout
from tutelage.transport.weights import formulas
from tutelage.transport.weights.boxes import Weight
from tutelage.transport.weights.grouping import contiguous, generation_layout, strided
from tutelage.transport.weights.llama import SMOLLM2_135M, Sizes, bytes_by_cut, llama_cuts, llama_weights
from tutelage.transport.weights.placements import Cut, on_ranks, placed
from tutelage.transport.weights.planning import Plan, plan

MODELS = {
    "tiny": llama_weights(TINY),
    "smollm2": llama_weights(SMOLLM2_135M, "bfloat16"),
    # Four of the 16 blocks of Llama-3.2-1B, whose weights every degree up to 8 divides, with a head of its own.
    "llama_1b": llama_weights(Sizes(128256, 2048, 8192, 4, 32, 8, 64, head=True), "bfloat16"),
}


def regroup(
    weights: Mapping[str, Weight],
    training: Layout,
    t_g: int,
    p_g: int = 1,
    *,
    vanilla: bool = False,
    nested: bool = True,
) -> Plan:
    generation = generation_layout(training, tensor=t_g, pipeline=p_g)
    numbers = (contiguous if vanilla else strided)(training, generation)
    source = placed(weights, training, llama_cuts(weights, pipeline=training.pipeline, nested=nested))
    target = placed(weights, generation, llama_cuts(weights, pipeline=p_g), numbers=numbers)
    return plan(source, target, weights)


def blocks_only(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Matrices of the blocks: cut by tensor parallel, and evenly over the stages."""
    return {name: weight for name, weight in weights.items() if "layers" in name and "norm" not in name}


def received(made: Plan, size: int) -> list[int]:
    return [made.received.get(rank, 0) for rank in range(size)]


def test_smollm2_has_its_published_number_of_parameters() -> None:
    assert sum(weight.nbytes for weight in MODELS["smollm2"].values()) == 2 * 134_515_008


def test_hand_values() -> None:
    # Training on 4 tensor ranks, generation on 2: half of the model is needed, a quarter is there.
    assert formulas.grouped(80, t=4, p=1, t_g=2, p_g=1) == 20
    # 2 tensor x 2 stages to 2 tensor: needs 40, has 20.  Read with tp = 2 alone, the formula would give 0.
    assert formulas.grouped(80, t=2, p=2, t_g=2, p_g=1) == 20
    assert formulas.grouped(80, t=2, p=4, t_g=1, p_g=2) == 30
    assert formulas.nested(80, n=4, t_g=2) == 20
    assert formulas.crossing(80, n=4, t_g=2) == 30
    assert formulas.elsewhere(80, t_g=2) == 40
    assert formulas.elsewhere(80, t_g=2, p_g=2) == 20
    assert formulas.gathered_whole(80, t=4, p=2) == 70
    # Pure pipeline training to 4 tensor slices: needs 20, has a quarter of that.
    assert formulas.either_way(80, t=1, p=4, t_g=4, p_g=1) == 15
    assert formulas.uneven_rows(4, 2) == 4


def test_the_paper_figure_one_four_two_to_one_two_two_two() -> None:
    """Figure 8: p t d = 1 4 2; generation tensor groups are (0, 2), (1, 3), (4, 6), (5, 7), counted from 0."""
    training = Layout(replicate=2, tensor=4)
    generation = generation_layout(training, tensor=2)
    numbers = strided(training, generation)
    groups: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        groups.setdefault(generation.coordinates(number)["replicate"], []).append(rank)
    assert sorted(groups.values()) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert contiguous(training, generation) == tuple(range(8))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("training", "t_g", "p_g"),
    [
        (Layout(tensor=4), 2, 1),
        (Layout(tensor=4), 1, 1),
        (Layout(replicate=2, tensor=4), 2, 1),
        (Layout(pipeline=2, tensor=2), 2, 1),
        (Layout(pipeline=2, tensor=2), 1, 1),
        (Layout(pipeline=2, tensor=4), 2, 2),
        (Layout(pipeline=2, replicate=2, tensor=2), 1, 2),
    ],
    ids=str,
)
def test_strided_groups_cost_the_paper_formula_on_every_rank(model: str, training: Layout, t_g: int, p_g: int) -> None:
    weights = blocks_only(MODELS[model])
    m = sum(weight.nbytes for weight in weights.values())
    expected = formulas.grouped(m, training.tensor, training.pipeline, t_g, p_g)
    made = regroup(weights, training, t_g, p_g)
    assert received(made, training.size) == [expected] * training.size
    vanilla = regroup(weights, training, t_g, p_g, vanilla=True)
    at_most = formulas.gathered_whole(m, training.tensor, training.pipeline) * training.size
    assert made.wire_bytes <= vanilla.wire_bytes <= at_most


def test_contiguous_groups_cost_more() -> None:
    """4 tensor ranks to 2: ranks 0 and 3 keep their quarter, ranks 1 and 2 need the half that they have nothing of."""
    weights = blocks_only(MODELS["smollm2"])
    m = sum(weight.nbytes for weight in weights.values())
    assert received(regroup(weights, Layout(tensor=4), 2, vanilla=True), 4) == [m // 4, m // 2, m // 2, m // 4]
    assert received(regroup(weights, Layout(tensor=4), 2), 4) == [m // 4] * 4
    # Two stages to one, where a replica of tensor ranks stays together: both groupings cost the same.
    training = Layout(pipeline=2, tensor=2)
    assert regroup(weights, training, 2, vanilla=True).wire_bytes == regroup(weights, training, 2).wire_bytes
    # Two stages of 4 tensor ranks to 2 tensor slices: 3 m / 8 for each rank, against 7 m / 16 on the mean.
    training = Layout(pipeline=2, tensor=4)
    assert regroup(weights, training, 2).wire_bytes == 8 * m * 3 // 8
    assert regroup(weights, training, 2, vanilla=True).wire_bytes == 8 * m * 7 // 16


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("training", "t_g", "p_g"),
    [(Layout(pipeline=2, tensor=2), 2, 1), (Layout(pipeline=4, tensor=2), 1, 2), (Layout(pipeline=3, tensor=2), 2, 1)],
    ids=str,
)
def test_the_mean_over_ranks_holds_for_the_whole_model(model: str, training: Layout, t_g: int, p_g: int) -> None:
    """Embedding and head make stages unequal, 3 stages do not divide 4 blocks: the mean is exact, a rank's is not."""
    weights = MODELS[model]
    sizes = bytes_by_cut(weights)
    expected = formulas.grouped(sizes[0] + sizes[1], training.tensor, training.pipeline, t_g, p_g)
    expected += formulas.grouped(sizes[None], 1, training.pipeline, 1, p_g)
    made = regroup(weights, training, t_g, p_g)
    assert Fraction(made.wire_bytes, training.size) == expected
    assert len(set(received(made, training.size))) > 1


@pytest.mark.parametrize(
    ("training", "t_g", "p_g"),
    [
        (Layout(pipeline=4), 4, 1),
        (Layout(pipeline=4), 2, 2),
        (Layout(replicate=4), 4, 1),
        (Layout(tensor=4), 1, 4),
        (Layout(pipeline=2, tensor=2), 4, 1),
        (Layout(replicate=2, tensor=2), 2, 2),
    ],
    ids=str,
)
def test_a_finer_generation_nests_the_other_way(training: Layout, t_g: int, p_g: int) -> None:
    weights = blocks_only(MODELS["tiny"])
    m = sum(weight.nbytes for weight in weights.values())
    expected = formulas.either_way(m, training.tensor, training.pipeline, t_g, p_g)
    made = regroup(weights, training, t_g, p_g)
    assert received(made, training.size) == [expected] * training.size


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("training", "t_g"),
    [
        (Layout(shard=4), 2),
        (Layout(shard=8), 4),
        (Layout(shard=4), 1),
        (Layout(shard=4), 4),
        (Layout(replicate=2, shard=2), 1),
        (Layout(replicate=2, shard=4), 2),
        (Layout(shard=2, tensor=2), 2),
        (Layout(shard=4, tensor=2), 4),
    ],
    ids=str,
)
def test_fsdp_shards_inside_generation_shards(model: str, training: Layout, t_g: int) -> None:
    """All of a model.  N is every slice of a matrix, tensor x shard; FSDP alone shards weights that are not cut."""
    sizes = bytes_by_cut(MODELS[model])
    n = training.shard * training.tensor
    whole = formulas.nested(sizes[None], training.shard, 1)
    made = regroup(MODELS[model], training, t_g)
    expected = formulas.nested(sizes[0] + sizes[1], n, t_g) + whole
    assert received(made, training.size) == [expected] * training.size
    if training.tensor == 1:
        by_rows = regroup(MODELS[model], training, t_g, nested=False)
        expected = formulas.nested(sizes[0], n, t_g) + formulas.crossing(sizes[1], n, t_g) + whole
        assert received(by_rows, training.size) == [expected] * training.size


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("training", [Layout(shard=4), Layout(replicate=2, shard=2), Layout(tensor=4)], ids=str)
@pytest.mark.parametrize("t_g", [1, 2, 4])
def test_an_engine_elsewhere_receives_all_of_its_shard(model: str, training: Layout, t_g: int) -> None:
    weights = MODELS[model]
    engine = placed(weights, Layout(tensor=t_g), llama_cuts(weights))
    made = plan(
        placed(weights, training, llama_cuts(weights)), on_ranks(engine, {r: 4 + r for r in range(t_g)}), weights
    )
    sizes = bytes_by_cut(weights)
    expected = formulas.elsewhere(sizes[0] + sizes[1], t_g) + formulas.elsewhere(sizes[None], 1)
    assert [made.received.get(rank, 0) for rank in range(4 + t_g)] == [0] * 4 + [expected] * t_g


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 4))
def test_uneven_rows_stay_within_the_bound(size: int, t_g: int, fold: int) -> None:
    n = t_g * fold
    weights = {"w": Weight((size, 3), "uint8")}
    training, cuts = Layout(shard=n), {"w": Cut(tensor=0)}
    generation = generation_layout(training, tensor=t_g)
    target = placed(weights, generation, cuts, numbers=strided(training, generation))
    made = plan(placed(weights, training, cuts), target, weights)
    for got in received(made, n):
        assert abs(Fraction(got, 3) - formulas.nested(size, n, t_g)) <= formulas.uneven_rows(n, t_g)
    if size % n == 0:
        assert received(made, n) == [3 * formulas.nested(size, n, t_g)] * n


degrees = st.sampled_from([1, 2, 3, 4])
few = st.sampled_from([1, 2, 3])


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([1, 2, 4]), few, few, degrees, degrees, st.sampled_from([1, 2, 4]))
def test_strided_is_a_permutation_and_never_costs_more(p: int, r: int, s: int, t: int, t_g: int, p_g: int) -> None:
    training = Layout(pipeline=p, replicate=r, shard=s, tensor=t)
    weights = {f"model.layers.{layer}.mlp.up_proj.weight": Weight((144, 1), "uint8") for layer in range(4)}
    try:
        generation = generation_layout(training, tensor=t_g, pipeline=p_g)
        numbers = strided(training, generation)
    except ConfigError:
        fits = training.size % (t_g * p_g) == 0
        nests = (t_g % (s * t) == 0 or s * t % t_g == 0) and (p_g % p == 0 or p % p_g == 0)
        enough = training.size % (max(t_g, s * t) * max(p_g, p)) == 0
        assert not (fits and nests and enough)
        return
    assert sorted(numbers) == list(range(training.size))
    made = regroup(weights, training, t_g, p_g)
    m = sum(weight.nbytes for weight in weights.values())
    assert set(received(made, training.size)) == {formulas.either_way(m, s * t, p, t_g, p_g)}
    assert made.wire_bytes <= regroup(weights, training, t_g, p_g, vanilla=True).wire_bytes


def test_no_renumbering_of_ranks_costs_less_than_strided() -> None:
    """All 24 assignments of 4 ranks, for 2 tensor x 2 stages to 2 tensor and 4 tensor to 2."""
    weights = blocks_only(MODELS["tiny"])
    for training in (Layout(tensor=4), Layout(pipeline=2, tensor=2), Layout(shard=4)):
        generation = generation_layout(training, tensor=2)
        source = placed(weights, training, llama_cuts(weights, pipeline=training.pipeline, nested=True))
        costs = [
            plan(source, placed(weights, generation, llama_cuts(weights), numbers=numbers), weights).wire_bytes
            for numbers in itertools.permutations(range(4))
        ]
        assert regroup(weights, training, 2).wire_bytes == min(costs) < max(costs)


def test_sizes_that_do_not_nest_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not divide the 4 ranks"):
        generation_layout(Layout(tensor=4), tensor=3)
    with pytest.raises(ConfigError, match="generation has 3 tensor slices, training 2"):
        strided(Layout(replicate=3, tensor=2), generation_layout(Layout(replicate=3, tensor=2), tensor=3))
    with pytest.raises(ConfigError, match="cannot stand on the 4 ranks"):
        strided(Layout(tensor=4), Layout(tensor=2))
    with pytest.raises(ConfigError, match="does not divide training"):
        formulas.grouped(80, t=2, p=1, t_g=4, p_g=1)
    with pytest.raises(ConfigError, match="3 neither divides 2"):
        formulas.either_way(80, t=2, p=1, t_g=3, p_g=1)
    with pytest.raises(ConfigError, match="4 generation slices do not divide 2 shards"):
        formulas.nested(80, n=2, t_g=4)
    with pytest.raises(ConfigError, match="5 pipeline stages for 4 blocks"):
        llama_cuts(MODELS["tiny"], pipeline=5)
