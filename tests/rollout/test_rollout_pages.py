"""Who holds which page, and what begins when."""

from __future__ import annotations

import random

import pytest

from tutelage.rollout.inprocess.admission import Queue, Request
from tutelage.rollout.inprocess.pages import PageTable, pages_for


def request(length, name="p", done=0, priority=0, token=1):
    return Request((token,) * length, 0, name, done, priority)


def begins(queue, table):
    """The requests that begin now, with their pages taken, or None where nothing is due."""
    due = queue.due(table)
    for admission in due:
        if admission.group.prefix is None:
            admission.group.prefix = table.prefix(len(admission.group.tokens))
    groups = [admission.group for admission in due]
    begun = queue.begin(due)
    for group, numbers in zip(groups, begun, strict=True):
        group.prefix.held = bool(group.rows)
        table.add([group.prefix] * len(numbers), [queue.own_positions(n) for n in numbers])
    return [n for numbers in begun for n in numbers] or None


@pytest.mark.parametrize("seed", range(5))
def test_no_page_has_two_owners_and_none_is_lost(seed):
    """A thousand steps of rows that begin, grow to what was promised to them, or end early."""
    rng = random.Random(seed)
    table, left = PageTable(60, 4), []
    prefixes = []
    for _ in range(1000):
        if rng.random() < 0.4:
            length, rows, most = rng.randint(1, 20), rng.randint(1, 4), rng.randint(1, 13)
            if pages_for(length, 4) + rows * pages_for(most, 4) <= table.room:
                prefix = table.prefix(length)
                prefix.held = False
                prefixes.append(prefix)
                table.add([prefix] * rows, [most] * rows)
                left += [most] * rows
        if len(table):
            table.extend()
            table.advance()
            left = [n - 1 for n in left]
            keep = [b for b in range(len(table)) if left[b] and rng.random() > 0.1]
            table.keep(keep)
            left = [left[b] for b in keep]
        prefixes = [p for p in prefixes if p.rows]
        held = [page for p in prefixes for page in p.pages] + [page for pages in table._own for page in pages]
        assert sorted([*held, *table.free]) == list(range(60)), "every page is held once or free"
        assert table.room >= 0
        assert table.peak >= len(held)
    table.keep([])
    assert table.free == tuple(range(60))


def test_prompts_take_the_lowest_free_pages_and_rows_the_highest():
    table = PageTable(10, 4)
    first, second = table.prefix(5), table.prefix(4)
    table.add([first, second], [8, 8])
    assert (first.pages, second.pages) == ((0, 1), (2,))
    assert sorted(table.extend()) == [8, 9]
    first.held = second.held = False
    table.advance()
    table.keep([1])
    assert table.prefix(9).pages == (0, 1, 3), "pages that came free are taken again"


def test_the_pages_of_a_prompt_stay_while_a_sample_of_it_waits():
    table = PageTable(10, 4)
    prefix = table.prefix(8)
    table.add([prefix], [4])
    table.keep([])
    assert len(table.free) == 8
    prefix.held = False
    table.release(prefix)
    assert len(table.free) == 10


def test_equal_prompts_are_one_group_whatever_they_are_called_and_the_longest_begins_first():
    queue = Queue([request(3, "a"), request(7, "b", token=2), request(3, "c"), request(7, "d")], 5, 64, 8192)
    assert begins(queue, PageTable(100, 4)) == [1, 3, 0, 2]
    assert not queue


def test_a_lower_priority_number_goes_before_a_longer_prompt():
    queue = Queue([request(7, priority=1), request(3, priority=0, done=1, token=2)], 5, 64, 8192)
    assert begins(queue, PageTable(100, 4)) == [1, 0]
    assert queue.own_positions(1) == 3


def test_what_does_not_fit_waits_and_nothing_overtakes_it():
    # Pages of 4: the prompt of 8 takes two, each of its rows ceil((9 - 1) / 4) = 2.  Seven pages hold two rows.
    queue = Queue([request(8)] * 3 + [request(1, token=2)], 9, 64, 8192)
    table = PageTable(7, 4)
    assert begins(queue, table) == [0, 1]
    assert begins(queue, table) is None
    table.keep([1])
    assert begins(queue, table) == [2], "its prompt is there already; the short prompt still has no room"
    table.keep([])
    assert begins(queue, table) == [3]


def test_slots_bound_the_rows():
    queue = Queue([request(2)] * 5, 4, 2, 8192)
    table = PageTable(100, 4)
    assert begins(queue, table) == [0, 1]
    assert begins(queue, table) is None
    table.keep([])
    assert begins(queue, table) == [2, 3]


def test_one_pass_prefills_so_many_tokens_and_a_longer_prompt_alone():
    queue = Queue([request(n, token=k) for k, n in enumerate((9, 4, 4, 3))], 2, 64, 8)
    table = PageTable(100, 4)
    assert [begins(queue, table) for _ in range(3)] == [[0], [1, 2], [3]]


def test_a_short_prompt_waits_for_company_beside_running_rows():
    # Ten rows run; two end, so nine slots of twelve are taken after one prompt of 40 tokens has begun.
    queue = Queue([request(40, token=n) for n in range(14)], 4, 10, 8192)
    table = PageTable(1000, 4)
    assert begins(queue, table) == list(range(10))
    table.keep(range(1, 10))
    assert begins(queue, table) is None, "40 tokens are fewer than 64, and nine of ten rows run"
    table.keep(range(1, 9))
    assert begins(queue, table) == [10, 11], "two prompts have 80"
    table.keep(range(1, 10))
    assert begins(queue, table) is None
    table.keep(range(7))
    assert begins(queue, table) == [12, 13]


def test_rows_of_a_prompt_that_is_prefilled_wait_for_nobody():
    """One sample of the first prompt is left; the short prompt behind it alone would not be worth a pass."""
    requests = [request(40, "a") for _ in range(5)] + [request(9, "b", token=2), request(9, "c", token=3)]
    queue, table = Queue(requests, 8, slots=4, prefill_tokens=999), PageTable(200, 4)
    assert begins(queue, table) == [0, 1, 2, 3]
    table.keep([0, 1, 2])
    assert begins(queue, table) == [4]
    table.keep([0, 1, 2])
    assert begins(queue, table) is None, "9 tokens are not worth a pass while three of four rows run"


def test_the_last_prompt_does_not_wait():
    queue = Queue([request(3, token=n) for n in range(11)], 4, 10, 8192)
    table = PageTable(1000, 4)
    begins(queue, table)
    table.keep(range(1, 10))
    assert begins(queue, table) == [10]
