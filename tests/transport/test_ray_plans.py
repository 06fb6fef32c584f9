"""How a call is cut over ranks and put together again, without Ray: every rank by hand."""

from __future__ import annotations

import pickle

import pytest
import ray_kit
import torch

from tutelage.errors import RolloutError, ShapeError, TrainingError
from tutelage.layout import Dispatch, Layout
from tutelage.transport.ray import rows
from tutelage.transport.ray.rows import Rows
from tutelage.transport.ray.split import Part, part_of, parts_of, replies, reply_places, row_plan
from tutelage.transport.ray.wire import Failure, is_echo
from tutelage.types import Ragged, Rollout, Scores


def lens(*tokens, batch=True, pairs=False):
    return Rows(torch.tensor(tokens), batch, pairs)


def indices(plan):
    return [(part.index.tolist(), part.filler) for part in plan.parts]


def test_rows_are_cut_by_the_tokens_of_the_batch_and_not_of_a_column_before_it():
    plan = row_plan("role.method", [lens(1, 1, 1, 1, batch=False), None, lens(9, 1, 4, 4), lens(7, batch=False)], 2)
    assert plan.split == (True, False, True, False)
    assert indices(plan) == [([0], False), ([1, 2, 3], False)]  # 9 against 4 + 4 + 1


def test_parts_without_rows_get_the_first_row_and_drop_its_result():
    plan = row_plan("role.method", [lens(2, 5)], 4)
    assert indices(plan) == [([1], False), ([0], False), ([0], True), ([0], True)]
    assert reply_places("role.method", Dispatch.ROWS, plan.parts[2], torch.zeros(1)).tolist() == []


def test_batches_of_different_rows_are_refused():
    with pytest.raises(ShapeError, match=r"role\.method got batches of 2 and of 3 rows"):
        row_plan("role.method", [lens(1, 1), lens(1, 1, 1)], 2)


@pytest.mark.parametrize(
    ("dispatch", "part", "value", "places"),
    [
        (Dispatch.ROWS, Part(torch.tensor([1, 4]), 5), torch.zeros(2), [1, 4]),
        (Dispatch.GENERATE, Part(torch.tensor([1, 4]), 5), torch.zeros(6), [3, 4, 5, 12, 13, 14]),
        (Dispatch.ROWS, Part(torch.tensor([1, 4]), 5, pairs=True), torch.zeros(4), [1, 4, 6, 9]),
        (Dispatch.ROWS, Part(torch.tensor([1, 4]), 5), ["a", "b"], [1, 4]),
    ],
    ids=["rows", "samples", "pairs", "texts"],
)
def test_where_the_rows_of_a_reply_stand(dispatch, part, value, places):
    assert reply_places("role.method", dispatch, part, value).tolist() == places


def test_samples_of_prompts_are_no_reply_by_rows():
    with pytest.raises(ShapeError, match=r"role\.method got 2 rows and replied with 6"):
        reply_places("role.method", Dispatch.ROWS, Part(torch.tensor([1, 4]), 5), torch.zeros(6))


def test_who_replies_and_for_which_part():
    layout = Layout(pipeline=2, shard=2, sequence=2, tensor=2)  # 16 ranks: stage, shard, sequence, tensor
    assert [r for r in range(16) if replies(Dispatch.ALL, layout, r)] == [0]
    assert [r for r in range(16) if replies(Dispatch.EACH, layout, r)] == list(range(16))
    assert [r for r in range(16) if replies(Dispatch.ROWS, layout, r)] == [8, 12]
    assert [r for r in range(16) if replies(Dispatch.GENERATE, layout, r)] == [8, 10, 12, 14]
    assert [r for r in range(16) if replies(Dispatch.MINIBATCH, layout, r)] == [8]
    assert [part_of(Dispatch.ROWS, layout, r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [part_of(Dispatch.GENERATE, layout, r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [parts_of(d, layout) for d in (Dispatch.ROWS, Dispatch.GENERATE, Dispatch.ALL)] == [2, 4, 1]


def in_parts(value, *places):
    """A fetch function over parts of a value, and the parts that were fetched."""
    fetched = []

    def fetch(parts):
        fetched.extend(parts)
        return [rows.select(value, torch.tensor(places[p], dtype=torch.int64)) for p in parts]

    return fetch, [torch.tensor(p, dtype=torch.int64) for p in places], fetched


def test_wanted_rows_are_fetched_from_the_parts_that_hold_them():
    value = Ragged.from_rows([torch.full((i + 1,), float(i)) for i in range(6)])
    fetch, places, fetched = in_parts(value, [5, 0], [], [2, 4], [3, 1])
    out = rows.assemble(fetch, places, torch.tensor([0, 1, 3]))
    assert [row.tolist() for row in out.rows()] == [[0.0], [1.0, 1.0], [3.0] * 4]
    assert fetched == [0, 3]
    assert rows.assemble(fetch, places, None).flat.tolist() == value.flat.tolist()


def test_parts_that_do_not_make_a_whole_are_refused():
    fetch, places, _ = in_parts(torch.arange(4), [0, 1], [1, 2])
    with pytest.raises(ShapeError, match="the 2 parts of a result do not hold each of its 4 rows once"):
        rows.assemble(fetch, places, None)


def test_prompts_scores_and_lists_are_cut_and_joined_by_rows():
    prompts = ray_kit.prompts_of(4)
    parts = [rows.select(prompts, torch.tensor(i)) for i in ([0, 3], [1, 2])]
    assert rows.concat(parts).ids == ("p0", "p3", "p1", "p2")
    assert rows.concat(parts).messages == tuple(prompts.messages[i] for i in (0, 3, 1, 2))
    scores = Scores(torch.arange(6.0).reshape(3, 2), torch.arange(3.0), ("a", "b"))
    joined = rows.concat([rows.select(scores, torch.tensor(i)) for i in ([2], [0, 1])])
    assert (joined.total.tolist(), joined.names) == ([2, 0, 1], ("a", "b"))
    assert rows.concat([["x"], ["y", "z"]]) == ["x", "y", "z"]
    with pytest.raises(ShapeError, match="parts of one result have different types"):
        rows.concat([["x"], torch.zeros(1)])


def test_bytes_are_those_of_all_tensors_inside():
    rollout = ray_kit.generated(ray_kit.prompts_of(1, n=1))  # 1 prompt token, 1 response token
    assert isinstance(rollout, Rollout)
    held = {"tokens": 2 * 8 + 8, "prompt_lens": 8, "trained": 1 + 8, "logp": 4 + 8, "finished": 1, "three columns": 24}
    assert rows.tensor_bytes([rollout, {"x": torch.zeros(2, 3)}, "text"]) == sum(held.values()) + 24


def test_a_value_is_sent_without_its_graph():
    weight = torch.ones(2, requires_grad=True)
    sent = rows.on_cpu({"a": [weight * 2], "b": Ragged(weight * 3, torch.tensor([1, 1])), "c": "text"})
    assert not sent["a"][0].requires_grad
    assert not sent["b"].flat.requires_grad
    pickle.dumps(sent)


# ---- errors on their way ----


class StubbornError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def caught(error):
    try:
        raise error
    except type(error) as raised:
        return Failure.of(raised, 1.0)


def test_an_error_travels_with_its_fix_and_notes():
    error = RolloutError("too long", fix="shorten")
    error.add_note("at p7")
    again = caught(error).restored()
    assert (type(again), again.what, again.fix, again.__notes__) == (RolloutError, "too long", "shorten", ["at p7"])
    assert str(again) == str(error)


def test_an_error_that_cannot_be_pickled_keeps_its_words_and_its_traceback():
    again = caught(StubbornError(1, 2)).restored()
    assert isinstance(again, TrainingError)
    assert "StubbornError: 1 and 2" in str(again)
    assert "in caught" in str(again)


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"), True),
        (torch.distributed.DistBackendError("NCCL watchdog"), True),
        (RuntimeError("CUDA error: device-side assert"), False),
        (RolloutError("timed out waiting for the prompt"), False),
        (ValueError("gloo"), False),
        (RuntimeError("Application timeout caused pair closure"), True),
    ],
)
def test_what_a_rank_sees_of_a_lost_peer_is_an_echo(error, echo):
    assert is_echo(error) is echo
