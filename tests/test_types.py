"""Ragged columns, sequences and batches against plain Python lists."""

from __future__ import annotations

import pytest
import torch

from tutelage.errors import ShapeError
from tutelage.types import Pairs, Ragged, Sequences, Stat, merge_stats

ROWS = [[1, 2, 3], [], [4], [5, 6]]


def ragged(rows=ROWS):
    return Ragged.from_rows([torch.tensor(r, dtype=torch.int64) for r in rows], torch.int64)


def as_lists(column: Ragged):
    return [row.tolist() for row in column.rows()]


def test_ragged_padding_round_trip_keeps_every_row():
    column = ragged()
    assert column.padded(fill=-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1], [5, 6, -1]]
    assert as_lists(Ragged.from_padded(column.padded(), column.lens)) == ROWS


def test_ragged_select_reorders_repeats_and_handles_empty_rows():
    assert as_lists(ragged().select(torch.tensor([3, 1, 0, 3]))) == [ROWS[3], ROWS[1], ROWS[0], ROWS[3]]
    assert as_lists(ragged().select(torch.tensor([], dtype=torch.int64))) == []


def test_ragged_concat_and_offsets():
    both = Ragged.concat([ragged(), ragged([[9]])])
    assert as_lists(both) == [*ROWS, [9]]
    assert both.offsets().tolist() == [0, 3, 3, 4, 6, 7]


def test_ragged_refuses_lengths_that_do_not_cover_the_flat_tensor():
    with pytest.raises(ShapeError, match="lengths sum to 3, the flat tensor has 4"):
        Ragged(torch.zeros(4), torch.tensor([1, 2]))


def sequences():
    return Sequences.build([[1, 2], [3], [4, 5, 6]], [[7], [8, 9], []], [[True], [False, True], []])


def test_response_index_points_at_the_response_tokens_only():
    assert sequences().tokens.flat[sequences().response_index()].tolist() == [7, 8, 9]
    assert sequences().prompt_rows() == [[1, 2], [3], [4, 5, 6]]
    assert sequences().response_rows() == [[7], [8, 9], []]


def test_sequences_select_keeps_prompts_responses_and_holes_together():
    picked = sequences().select(torch.tensor([1, 0]))
    assert picked.prompt_rows() == [[3], [1, 2]]
    assert picked.response_rows() == [[8, 9], [7]]
    assert as_lists(picked.trained) == [[False, True], [True]]


def test_sequences_refuse_a_prompt_length_that_does_not_fit():
    good = sequences()
    with pytest.raises(ShapeError, match="prompt_lens"):
        Sequences(good.tokens, good.prompt_lens + 1, good.trained)


def test_pairs_are_never_cut_and_list_chosen_before_rejected():
    chosen = Sequences.build([[1], [2]], [[3], [4]])
    rejected = Sequences.build([[1], [2]], [[5, 5], [6]])
    pairs = Pairs(chosen, rejected, torch.zeros(2), ("a", "b"))
    assert pairs.item_tokens().tolist() == [5, 4]
    assert pairs.select(torch.tensor([1])).sequences.response_rows() == [[4], [6]]
    assert pairs.select(torch.tensor([1])).ids == ("b",)


def test_parts_join_unless_only_some_of_them_have_a_column():
    made = [
        Pairs(Sequences.build([[1]], [[i]]), Sequences.build([[1]], [[9]]), torch.tensor([float(i)]), (str(i),))
        for i in range(3)
    ]
    whole = Pairs.concat(made)
    assert (whole.ids, whole.margin.tolist(), whole.ref_chosen_logp) == (("0", "1", "2"), [0.0, 1.0, 2.0], None)
    logp = Ragged(torch.tensor([-0.5]), torch.tensor([1]))
    every = [part.adding(ref_chosen_logp=logp) for part in made]
    assert Pairs.concat(every).ref_chosen_logp.flat.tolist() == [-0.5] * 3
    for missing in range(3):
        parts = [*every[:missing], made[missing], *every[missing + 1 :]]
        with pytest.raises(ShapeError, match="some of the parts have no ref_chosen_logp"):
            Pairs.concat(parts)


def test_minibatches_cover_every_item_once_per_epoch():
    pairs = Pairs(
        Sequences.build([[1]] * 5, [[2]] * 5),
        Sequences.build([[1]] * 5, [[3]] * 5),
        torch.arange(5.0),
        tuple("abcde"),
    )
    parts = list(pairs.minibatches(2, 2, lambda epoch, n: torch.arange(n).flip(0) if epoch else torch.arange(n)))
    assert [p.ids for p in parts] == [("a", "b", "c"), ("d", "e"), ("e", "d", "c"), ("b", "a")]
    with pytest.raises(ShapeError, match="6 mini-batches cannot be cut from 5 items"):
        next(pairs.minibatches(1, 6, lambda epoch, n: torch.arange(n)))


def test_stats_average_over_real_entries_whatever_the_cut():
    values = torch.tensor([1.0, 2.0, float("nan"), 5.0])
    mask = torch.tensor([True, True, False, True])
    whole = Stat.of(values, mask)
    parts = merge_stats([{"x": Stat.of(values[:1], mask[:1])}, {"x": Stat.of(values[1:], mask[1:])}])
    assert whole.mean == pytest.approx(8 / 3)
    assert parts["x"].mean == pytest.approx(8 / 3)
