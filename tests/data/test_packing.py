"""Which items run together: costs, even partitions, groups that keep one prompt in one bin, shares of ranks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutelage.data.packing import pack, pack_by_tokens
from tutelage.models.prefix import attention_cost
from tutelage.sharing import Workload, balanced, differencing, heaviest, lightest_first, same_prompts, shares, workload
from tutelage.types import Demonstrations, Outputs, Pairs, Ragged, Sequences

A, B = list(range(10, 20)), list(range(30, 42))  # prompts of 10 and of 12 tokens


def answers(*lens: int) -> list[list[int]]:
    return [[5] * n for n in lens]


def demonstrations(prompts: list[list[int]], *lens: int) -> Demonstrations:
    return Demonstrations(Sequences.build(prompts, answers(*lens)), tuple(str(i) for i in range(len(lens))))


def lists(parts: list[torch.Tensor]) -> list[list[int]]:
    return [part.tolist() for part in parts]


def best(costs: list[int], count: int) -> int:
    """The smallest heaviest part of all assignments."""
    found = [0] * count
    least = sum(costs)
    for where in itertools.product(range(count), repeat=len(costs)):
        found = [0] * count
        for cost, at in zip(costs, where, strict=True):
            found[at] += cost
        least = min(least, max(found))
    return least


# ---- partitions ----


def test_differencing_two_parts_by_hand():
    # 8 7 6 5 4 -> (8-7) 1, 6 5 4 -> (6-5) 1, 4 1 -> 4-1 = 3, then 3-1 = 2: parts of 16 and 14 (Karmarkar and Karp)
    parts = differencing([8, 7, 6, 5, 4], 2)
    assert sorted(sum((8, 7, 6, 5, 4)[i] for i in part) for part in parts) == [14, 16]
    assert sorted(i for part in parts for i in part) == [0, 1, 2, 3, 4]


def test_differencing_three_parts_by_hand():
    # 9 | 8 | 7 | 3 | 2 | 1: largest spreads first: (9,8) (9,8,7) spread 2; (3,2) spread 3 with 1: (3,2,1) spread 2;
    # then the heaviest meets the lightest: 9+1, 8+2, 7+3
    parts = differencing([9, 8, 7, 3, 2, 1], 3)
    assert sorted(sorted(part) for part in parts) == [[0, 5], [1, 4], [2, 3]]


def test_differencing_is_better_than_the_largest_first_where_that_goes_wrong():
    costs = [5, 5, 4, 3, 3]  # largest first: 5+3+3, 5+4
    assert heaviest(lightest_first(costs, 2), costs) == 11
    # 5-5 = 0, 4-3 = 1, 3-1 = 2: parts of 11 and 9; the optimum is 10
    assert heaviest(differencing(costs, 2), costs) == 11
    assert best(costs, 2) == 10
    costs = [7, 6, 5, 4, 4]
    assert heaviest(lightest_first(costs, 2), costs) == 15
    assert heaviest(differencing(costs, 2), costs) == 14


def test_more_parts_than_items_leaves_parts_empty():
    assert sorted(lists(balanced(torch.tensor([4, 7]), 3))) == [[], [0], [1]]
    assert lists(balanced(torch.tensor([], dtype=torch.int64), 2)) == [[], []]
    assert lists(balanced(torch.tensor([1, 2, 3]), 1)) == [[0, 1, 2]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6))
def test_every_item_is_in_one_part_and_the_heaviest_is_no_heavier_than_largest_first(costs: list[int], count: int):
    parts = lists(balanced(torch.tensor(costs, dtype=torch.int64), count))
    assert len(parts) == count
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert heaviest(parts, costs) <= heaviest(lightest_first(costs, count), costs)
    if len(costs) <= 6 and count <= 3:
        assert heaviest(parts, costs) <= best(costs, count) * 4 / 3 + 1e-9


# ---- costs ----


def test_prompts_are_compared_by_their_tokens_and_short_ones_are_not_shared():
    seqs = Sequences.build([A, B, A, A[:9], A[:7], A[:7]], [*answers(1, 2, 3, 4), [9], [9, 9]])
    assert same_prompts(seqs).tolist() == [0, 1, 0, 3, 4, 5]


def test_what_sequences_cost_alone_and_together():
    work = workload(demonstrations([A, B, A], 4, 3, 2), attention=0.01)
    # 14 tokens alone: 14 + 0.01 * 196; 10 + 4 + 2 together: prompt 10 + 1, answers 4 + .01 (16 + 80), 2 + .01 (4 + 40)
    assert work.tokens([0]) == 14
    assert work.cost([0]) == pytest.approx(14 + 1.96)
    assert work.tokens([0, 2]) == 16
    assert work.cost([0, 2]) == pytest.approx(11 + 4.96 + 2.44)
    assert work.tokens([0, 1, 2]) == 16 + 15
    assert work.groups() == [[0, 2], [1]]
    apart = workload(demonstrations([A, B, A], 4, 3, 2), attention=0.01, share=False)
    assert apart.tokens([0, 2]) == 26
    assert apart.groups() == [[0], [1], [2]]


def test_a_pair_with_one_prompt_counts_it_once_and_with_two_counts_both():
    chosen, rejected = Sequences.build([A, A, B], answers(4, 3, 2)), Sequences.build([A, B, B], answers(5, 1, 6))
    work = workload(Pairs(chosen, rejected, torch.zeros(3), ("a", "b", "c")), attention=0.1)
    assert [work.tokens([i]) for i in range(3)] == [10 + 9, 13 + 13, 12 + 8]
    # prompt 10 + 10; answers 4 + .1 (16 + 80) and 5 + .1 (25 + 100)
    assert work.cost([0]) == pytest.approx(20 + 4 + 9.6 + 5 + 12.5)
    assert work.cost([1]) == pytest.approx(2 * (13 + 16.9))
    assert work.groups() == [[0], [1], [2]]


def test_the_cost_of_attention_by_hand():
    # SmolLM2-135M: H D (2 h + 2 g) = 576 * 64 * 24, 3 H I = 3 * 576 * 1536; h D = 576
    config = SimpleNamespace(
        hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536
    )
    assert attention_cost(config) == pytest.approx(576 / (884736 + 2654208))
    small = SimpleNamespace(hidden_size=64, num_attention_heads=2)  # no groups; the MLP is 4 H wide
    assert attention_cost(small) == pytest.approx(64 / (64 * 32 * 8 + 3 * 64 * 256))
    experts = SimpleNamespace(
        hidden_size=64, num_attention_heads=2, intermediate_size=500, num_experts_per_tok=2, moe_intermediate_size=32
    )
    assert attention_cost(experts) == pytest.approx(64 / (64 * 32 * 8 + 3 * 64 * 64))
    assert attention_cost(SimpleNamespace()) == 0.0


# ---- bins ----


def test_long_sequences_weigh_more_than_their_tokens():
    # 100 tokens cost 200, 50 cost 75, 25 cost 31.25, with c = 0.01; by tokens 100+25+25 | 50+50+50 is even
    tokens = torch.tensor([100, 50, 50, 50, 25, 25])
    assert lists(pack_by_tokens(tokens, 150)) == [[0, 4, 5], [1, 2, 3]]
    # 256.25 and 231.25; 262.5 and 225 as above
    assert lists(pack_by_tokens(tokens, 200, attention=0.01)) == [[1, 2, 3, 5], [0, 4]]


def test_the_budget_comes_before_even_costs():
    # 20 tokens cost 60 and 5 cost 7.5: even would be 20 | 8 * 5, which is 40 tokens
    assert lists(pack_by_tokens(torch.tensor([20] + [5] * 8), 30, attention=0.1)) == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]


def test_a_group_is_one_bin_and_its_prompt_counts_once():
    batch = demonstrations([A, B, A, B, A, B], 4, 4, 4, 4, 4, 4)
    work = workload(batch)
    assert lists(pack(work, 24)) == [[1, 3, 5], [0, 2, 4]]  # 12 + 12 and 10 + 12: without sharing one item a bin
    assert len(pack(workload(batch, share=False), 24)) == 6
    assert lists(pack(work, 46)) == [[0, 1, 2, 3, 4, 5]]


def test_a_group_above_the_budget_is_cut_evenly():
    batch = demonstrations([A] * 6, 4, 4, 4, 4, 4, 4)
    # room for 14 tokens of answers behind the prompt: 3 answers a bin
    assert sorted(len(one) for one in pack(workload(batch), 24)) == [3, 3]
    # 10 and 4 tokens do not fit 13: every item alone
    assert lists(pack(workload(batch), 13)) == [[0], [1], [2], [3], [4], [5]]
    assert lists(pack(workload(batch), 9)) == [[0], [1], [2], [3], [4], [5]]


def test_whole_groups_never_need_more_bins_than_their_items():
    prompts = [list(range(100 * g, 100 * g + 8)) for g in range(1, 6)]
    # a group has 8 + 2 * 22 = 52 tokens, one in a bin of 90: 5 bins; an item has 30, three in a bin: 4 bins
    batch = demonstrations([p for p in prompts for _ in range(2)], *[22] * 10)
    assert len(pack(workload(batch), 90)) == 4
    # with a budget of 104 two groups are in a bin: 3 bins, where three items each would make 4
    bins = lists(pack(workload(batch), 104))
    assert len(bins) == 3
    assert all(len({i // 2 for i in one}) * 2 == len(one) for one in bins)


items = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=25)


@settings(max_examples=80, deadline=None)
@given(items, st.integers(1, 120), st.sampled_from([0.0, 0.01]))
def test_packing_groups_keeps_every_item_once_within_the_budget(found, budget: int, attention: float):
    prompts = [[100 * g + i for i in range(6 + 2 * g)] for g, _ in found]  # the first is too short to be shared
    if not found:
        return
    batch = demonstrations(prompts, *(n for _, n in found))
    work = workload(batch, attention)
    bins = lists(pack(work, budget))
    assert sorted(i for one in bins for i in one) == list(range(len(found)))
    for one in bins:
        held = {tuple(prompts[i]) if len(prompts[i]) >= 8 else i: len(prompts[i]) for i in one}
        tokens = sum(held.values()) + sum(found[i][1] for i in one)
        assert tokens == work.tokens(one)
        assert tokens <= budget or len(one) == 1
    assert len(bins) <= len(pack(workload(batch, attention, share=False), budget))
    assert bins == lists(pack(workload(batch, attention), budget))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200))
def test_bins_are_no_less_even_than_first_fit_or_the_largest_to_the_lightest(tokens: list[int], budget: int):
    bins = lists(pack_by_tokens(torch.tensor(tokens), budget))
    loads = sorted(sum(tokens[i] for i in one) for one in bins)
    room: list[int] = []  # first-fit decreasing
    for size in sorted(tokens, reverse=True):
        at = next((k for k, left in enumerate(room) if left >= size), None)
        if at is None:
            room.append(budget - size)
        else:
            room[at] -= size
    assert len(bins) == len(room)
    assert loads[-1] <= budget - min(room)
    dealt = [0] * len(room)
    for size in sorted(tokens, reverse=True):
        dealt[dealt.index(min(dealt))] += size
    if max(dealt) <= budget:
        assert loads[-1] <= max(dealt)


def test_a_workload_without_groups_is_packed_as_its_tokens():
    tokens = torch.tensor([6, 5, 4, 3, 2])
    assert lists(pack(Workload.of_tokens(tokens), 10)) == lists(pack_by_tokens(tokens, 10))
    batch = demonstrations([A, B, A[:9], B[:9]], 5, 9, 4, 1)
    assert lists(pack(workload(batch), 30)) == lists(pack_by_tokens(batch.item_tokens(), 30))


# ---- shares of ranks ----


class TokenLoss:
    outputs = frozenset({"logp"})

    def weights(self, batch: Demonstrations) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.ones(int(lens.sum())), lens)

    def items(self, out: Outputs, batch: Demonstrations):
        raise NotImplementedError


def indices(batch: Demonstrations, count: int) -> list[list[int]]:
    return [share.index.tolist() for share in shares(batch, TokenLoss(), count)]


def test_ranks_get_whole_groups_where_that_is_less_work():
    batch = demonstrations([A, B, A, B, A, B], 4, 4, 4, 4, 4, 4)
    assert indices(batch, 2) == [[1, 3, 5], [0, 2, 4]]  # 24 and 22 tokens; three of each would be 34 in both


def test_one_group_is_still_spread_over_ranks():
    assert sorted(map(len, indices(demonstrations([A] * 8, *[4] * 8), 4))) == [2, 2, 2, 2]


def test_shares_of_different_prompts_are_even_in_tokens():
    batch = demonstrations([A, B, A[:9], B[:9]], 1, 2, 3, 4)  # 11 14 12 13
    assert sorted(indices(batch, 2)) == [[0, 1], [2, 3]]
