"""Splits by prompt, token budgets, and the sampler with its cursor."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutelage.data.packing import pack_by_tokens
from tutelage.data.sampler import EpochSampler
from tutelage.data.splits import group_hash, grouped_folds, split_by_group
from tutelage.errors import CheckpointError, ConfigError, DataError, ShapeError

GROUPS = [f"g{index % 60}" for index in range(200)]


def test_no_group_is_on_both_sides_and_order_does_not_matter() -> None:
    kept, held = split_by_group(GROUPS, 0.25, seed=3)
    assert sorted(torch.cat([kept, held]).tolist()) == list(range(200))
    sides = {GROUPS[i] for i in kept.tolist()}, {GROUPS[i] for i in held.tolist()}
    assert not sides[0] & sides[1]
    backwards = split_by_group(GROUPS[::-1], 0.25, seed=3)
    assert {GROUPS[::-1][i] for i in backwards[1].tolist()} == sides[1]
    fewer = split_by_group(GROUPS[:50], 0.25, seed=3)
    assert {GROUPS[i] for i in fewer[1].tolist()} <= sides[1]
    assert {GROUPS[i] for i in split_by_group(GROUPS, 0.25, seed=4)[1].tolist()} != sides[1]


def test_share_held_out_is_about_the_fraction() -> None:
    groups = [str(index) for index in range(4000)]
    held = split_by_group(groups, 0.1, seed=0)[1]
    assert abs(len(held) - 400) < 5 * (4000 * 0.1 * 0.9) ** 0.5  # five standard deviations of a binomial


def test_split_of_few_groups_leaves_neither_side_empty() -> None:
    for seed, fraction in itertools.product(range(20), (0.001, 0.999)):
        kept, held = split_by_group(["a", "b", "b"], fraction, seed)
        assert len(kept)
        assert len(held)
    assert len(split_by_group(["a"], 0.0, 0)[1]) == 0
    with pytest.raises(DataError, match="1 different prompts"):
        split_by_group(["a", "a"], 0.5, 0)


def test_group_hash_is_the_same_everywhere() -> None:
    # printf '7\\0x' | sha256sum, the first 16 digits
    assert group_hash(7, "x") == 0x6D6F910E0D5A6A9A


def test_folds_cover_every_row_once_keep_groups_together_and_are_balanced() -> None:
    groups = [name for name, size in (("a", 9), ("b", 5), ("c", 4), ("d", 3), ("e", 3), ("f", 3)) for _ in range(size)]
    folds = grouped_folds(groups, 3, seed=0)
    assert sorted(torch.cat(folds).tolist()) == list(range(27))
    names = [{groups[i] for i in fold.tolist()} for fold in folds]
    assert all(not a & b for a, b in itertools.combinations(names, 2))
    assert sorted(len(fold) for fold in folds) == [8, 9, 10]  # 9 | 5+3 | 4+3+3, dealt by hand
    order = torch.randperm(27, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = grouped_folds([groups[i] for i in order], 3, seed=0)
    assert [{groups[order[i]] for i in fold.tolist()} for fold in shuffled] == names
    with pytest.raises(DataError, match="6 groups cannot fill 7 folds"):
        grouped_folds(groups, 7, seed=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 50))
def test_packing_covers_every_item_once_within_the_budget(tokens: list[int], budget: int) -> None:
    bins = pack_by_tokens(torch.tensor(tokens, dtype=torch.int64), budget)
    assert sorted(i for one in bins for i in one.tolist()) == list(range(len(tokens)))
    for one in bins:
        assert len(one)
        total = sum(tokens[i] for i in one.tolist())
        assert total <= budget or len(one) == 1
    # two bins that would fit into one leave more than half of the budget unused: first fit never has that
    loads = sorted(sum(tokens[i] for i in one.tolist()) for one in bins)
    if len(loads) > 1 and loads[-1] <= budget:
        assert sum(loads) > budget * (len(loads) - 1) / 2


def test_packing_by_hand() -> None:
    bins = pack_by_tokens(torch.tensor([6, 5, 4, 3, 2]), 10)
    assert [one.tolist() for one in bins] == [[0, 2], [1, 3, 4]]  # 6+4 and 5+3+2
    even = pack_by_tokens(torch.tensor([3, 3, 3, 3]), 9)
    assert [len(one) for one in even] == [2, 2]  # first fit would make 3 and 1
    assert [one.tolist() for one in pack_by_tokens(torch.tensor([2, 50, 2]), 10)] == [[1], [0, 2]]
    assert pack_by_tokens(torch.tensor([], dtype=torch.int64), 10) == []
    with pytest.raises(ConfigError, match="budget is 0"):
        pack_by_tokens(torch.tensor([1]), 0)
    with pytest.raises(ShapeError):
        pack_by_tokens(torch.tensor([1.0]), 5)


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2] * 3), (True, [4, 4] * 3)])
def test_every_epoch_visits_every_row_once(drop_last: bool, sizes: list[int]) -> None:
    sampler = EpochSampler(10, 4, 3, seed=1, drop_last=drop_last)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == sizes
    assert sampler.steps == len(sizes)
    per_epoch = len(sizes) // 3
    epochs = [torch.cat(batches[e * per_epoch : (e + 1) * per_epoch]).tolist() for e in range(3)]
    assert all(len(set(rows)) == len(rows) == sum(sizes) // 3 for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    assert list(sampler) == []


def test_sampler_goes_on_from_its_cursor() -> None:
    whole = [batch.tolist() for batch in EpochSampler(10, 3, 2, seed=5)]
    for stop in range(1, len(whole)):
        first = EpochSampler(10, 3, 2, seed=5)
        seen = [batch.tolist() for batch in itertools.islice(first, stop)]
        second = EpochSampler(10, 3, 2, seed=5)
        second.load_state(first.state())
        assert seen + [batch.tolist() for batch in second] == whole
    assert [batch.tolist() for batch in EpochSampler(10, 3, 2, seed=6)] != whole


def test_sampler_refuses_a_cursor_of_other_data() -> None:
    state = EpochSampler(10, 3, 2, seed=5).state()
    with pytest.raises(CheckpointError, match="has n=10, this run has n=11"):
        EpochSampler(11, 3, 2, seed=5).load_state(state)
    with pytest.raises(CheckpointError, match="step 99 of 8"):
        EpochSampler(10, 3, 2, seed=5).load_state({**state, "step": 99})
    with pytest.raises(DataError, match="give no step"):
        EpochSampler(3, 4, 1, seed=0, drop_last=True)
