"""Errors, lost ranks, restarts, deadlines, pools that do not fit: what the driver says, and that it says it once."""

from __future__ import annotations

import re
import socket
import sys
import time

import pytest
import ray_kit

pytest.importorskip("ray")

from tutelage.errors import ClusterError, ConfigError, MissingExtraError, RolloutError
from tutelage.transport.ray import ray_transport
from tutelage.transport.ray.connect import endpoints, require_same
from tutelage.transport.roleset import RoleSet


@pytest.fixture(scope="module")
def events():
    return []


@pytest.fixture(scope="module")
def transport(events):
    """Two ranks and one: collectives give up after 10 seconds, calls after 90."""
    ray_kit.shared_ray()
    cluster = ray_kit.cluster(
        pools={"pair": 2, "single": 1},
        place={"single": "single"},
        collective_timeout=10,
        call_timeout=90,
        start_timeout=20,
    )
    running = ray_transport(cluster, event=lambda kind, message: events.append((kind, message)))
    running.roles_ = RoleSet(running.start(ray_kit.toys, ("toy", "single"))[0])
    yield running
    running.close()


def note_of(error):
    return next(note for note in error.__notes__ if note.startswith("in "))


def test_an_error_arrives_as_itself_with_its_fix_its_notes_and_its_rank(transport):
    with pytest.raises(RolloutError, match="the prompt has 9 tokens") as caught:
        transport.roles_.toy.refuse().gather()
    assert (caught.value.what, caught.value.fix) == ("the prompt has 9 tokens, 4 fit", "shorten it")
    assert caught.value.__notes__[0] == "at prompt p7"
    assert re.match(r"in toy\.refuse, rank [01] of pool pair on ", note_of(caught.value))  # both refuse


def test_a_foreign_error_keeps_its_class_and_brings_its_traceback(transport):
    with pytest.raises(KeyError, match="inside") as caught:
        transport.roles_.toy.fail().gather()
    assert any("Traceback on the rank" in note and "in fail" in note for note in caught.value.__notes__)


def test_what_depends_on_a_failed_call_fails_with_its_error_and_does_not_run(transport):
    single = transport.roles_.single
    single.seen().gather()
    later = single.add(transport.roles_.toy.refuse(), 1)
    with pytest.raises(RolloutError, match="the prompt has 9 tokens") as caught:
        later.gather()
    assert sum(note.startswith("in ") for note in caught.value.__notes__) == 1
    assert single.seen().gather() == [[]]  # and nothing is told again


def test_an_error_that_nobody_gathers_is_told_by_the_next_wait(transport):
    transport.roles_.toy.refuse()
    with pytest.raises(RolloutError, match="the prompt has 9 tokens"):
        transport.roles_.toy.nap(0.0).gather()
    assert transport.roles_.toy.nap(0.0).gather() == "awake"


@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_error_of_one_rank_counts_and_not_the_timeout_of_its_peer(transport, bad):
    orders = ["", ""]
    orders[bad] = "raise"
    start = time.monotonic()
    with pytest.raises(RolloutError, match="rank refuses") as caught:
        transport.roles_.toy.collective(orders).gather()
    assert time.monotonic() - start < 9  # the peer still waits in its collective
    assert note_of(caught.value).startswith(f"in toy.collective, rank {bad} of pool pair on ")
    assert transport.roles_.toy.who().gather() == [0, 1]  # after the peer gave up, the pool works


def test_a_dead_rank_is_named_with_its_last_words_and_its_group_can_be_started_again(transport, events):
    roles = transport.roles_
    roles.toy.load(41).gather()
    with pytest.raises(
        ClusterError, match=r"rank 1 of pool pair on .* was lost while it ran toy\.collective"
    ) as caught:
        roles.toy.collective(["", "die"]).gather()
    assert "these are my last words" in caught.value.what
    assert caught.value.pool == "pair"
    assert transport.lost() == ("pair",)
    with pytest.raises(ClusterError, match="was lost while it ran"):
        roles.toy.who()
    assert roles.single.who().gather() == [0]  # the other pool goes on
    assert transport.restart("pair") == ("every role is a toy", "rank 0", "rank 1")
    assert transport.lost() == ()
    assert roles.toy.seen().gather() == [[], []]  # as the builder makes them
    assert roles.toy.collective(["", ""]).gather() == [2.0, 2.0]
    assert events[-1][0] == "restart"
    assert events[-1][1].startswith("pool pair: 2 ranks started again on ")


@pytest.mark.slow
def test_results_that_read_from_a_dead_rank_name_that_rank(transport):
    lost = transport.roles_.toy.collective(["die", ""])
    with pytest.raises(ClusterError, match="rank 0 of pool pair"):
        transport.roles_.single.add(lost, 1).gather()
    assert transport.lost() == ("pair",)
    transport.restart("pair")
    assert transport.roles_.toy.who().gather() == [0, 1]


@pytest.mark.slow
def test_a_call_that_does_not_end_is_given_up_with_the_ranks_that_are_late(transport):
    transport.ledger.call_timeout = 5.0
    try:
        with pytest.raises(ClusterError, match=r"single\.nap has not ended within 5 s .*rank 0 of pool single"):
            transport.roles_.single.nap(30.0).gather()
    finally:
        transport.ledger.call_timeout = 90.0
    transport.restart("single")
    assert transport.roles_.single.nap(0.0).gather() == "awake"


@pytest.mark.slow
def test_a_builder_that_fails_on_one_rank_fails_as_itself_and_leaves_nothing(events):
    running = ray_transport(ray_kit.cluster(pools={"main": 2}, collective_timeout=30))
    start = time.monotonic()
    with pytest.raises(RolloutError, match="rank 1 cannot build") as caught:
        running.start(ray_kit.failing, ("toy",))
    assert note_of(caught.value).startswith("in build, rank 1 of pool main on ")
    assert running.pools == {}
    assert time.monotonic() - start < 60


# ---- before anything runs ----


def test_a_pool_that_cannot_be_placed_says_what_it_asks_for_and_what_exists():
    ray_kit.shared_ray()
    pool = {"devices": 3, "per_device": 1.5, "kind": "cpu", "strategy": "STRICT_PACK"}
    running = ray_transport(ray_kit.cluster(pools={"big": pool}, start_timeout=1))
    expected = (
        r"pool big asks for 3 x \(CPU 1\.5\), strategy STRICT_PACK: not placed within 1 s \(cluster\.start_timeout\); "
        r"the cluster has 1 node: \S+#\w{6}: CPU [\d.]+ of 2 free, GPU 0 of 0 free"
    )
    with pytest.raises(ClusterError, match=expected) as caught:
        running.start(ray_kit.toys, ("toy",))
    assert "cluster.pools.big.devices" in caught.value.fix


def test_a_layout_that_is_not_its_pool_is_refused_with_both_numbers():
    ray_kit.shared_ray()
    running = ray_transport(ray_kit.cluster(pools={"main": 4}, layout={"toy": {"tensor": 3}}))
    with pytest.raises(ConfigError, match=r"the layout of toy \(tensor 3\) has 3 ranks, its pool main has 4 devices"):
        running.start(ray_kit.toys, ("toy",))


@pytest.fixture
def disconnected(monkeypatch):
    """As in a process that has no Ray yet."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


def test_an_address_where_nothing_listens(disconnected):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"nothing answers at cluster.address {address}"):
            ray_transport(ray_kit.cluster(address=address, start_timeout=2)).start(ray_kit.toys, ("toy",))


def test_another_cluster_than_the_one_connected_to_is_refused_and_not_used_silently():
    import ray

    ray_kit.shared_ray()
    here = ray.get_runtime_context().gcs_address
    require_same(here)
    require_same(f"127.0.0.1:{here.rpartition(':')[2]}")
    require_same("auto")
    require_same(None)
    other = f"127.0.0.1:{int(here.rpartition(':')[2]) + 1}"
    with pytest.raises(ClusterError, match=f"cluster.address is {other}, and this process is connected to .*{here}"):
        ray_transport(ray_kit.cluster(address=other)).start(ray_kit.toys, ("toy",))
    with pytest.raises(ClusterError, match=r"cluster\.address is 'head-node'"):
        ray_transport(ray_kit.cluster(address="head-node")).start(ray_kit.toys, ("toy",))


def test_a_name_and_its_number_are_the_same_address():
    assert endpoints("localhost", 6379) & endpoints("127.0.0.1", 6379)
    assert endpoints("localhost", 6379).isdisjoint(endpoints("localhost", 6380))
    assert endpoints("no such host", 6379) == {("no such host", 6379)}


@pytest.mark.slow
def test_a_port_that_something_else_has_taken(disconnected):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(
            ClusterError, match=f"{address} accepts connections, but no Ray cluster answered within 5 s"
        ):
            ray_transport(ray_kit.cluster(address=address, start_timeout=5)).start(ray_kit.toys, ("toy",))
        assert time.monotonic() - start < 15


@pytest.mark.parametrize("address", ["here", "10.0.0.1", "ray://head"])
def test_an_address_that_is_none(disconnected, address):
    with pytest.raises(ClusterError, match="give auto, HOST:PORT or ray://HOST:PORT"):
        ray_transport(ray_kit.cluster(address=address)).start(ray_kit.toys, ("toy",))


def test_without_ray_the_install_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tutelage\[ray\]'"):
        ray_transport(ray_kit.cluster())
