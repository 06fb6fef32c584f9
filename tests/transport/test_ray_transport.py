"""The ray transport on toy roles: 4 ranks in one pool (2 shards x 2 tensor peers), 3 in another, on one machine."""

from __future__ import annotations

import pytest
import ray_kit
import torch

pytest.importorskip("ray")

from tutelage.algorithms import ppo
from tutelage.config.ppo import PPOConfig
from tutelage.errors import ConfigError, ShapeError
from tutelage.sharing import balanced
from tutelage.transport.local import LocalTransport
from tutelage.transport.ray import ray_transport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Pairs, Ragged, Rollout, Sequences


@pytest.fixture(scope="module")
def progress():
    return []


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def transport(progress, log_dir):
    ray_kit.shared_ray()
    cluster = ray_kit.cluster(
        pools={"grid": 4, "trio": 3},
        place={"trio": "trio", "critic": "trio", "reward": "trio"},
        layout={"grid": {"shard": 2, "tensor": 2}, "actor": {"sequence": 2, "tensor": 2}},
    )
    running = ray_transport(cluster, progress=lambda *told: progress.append(told))
    running.handles_, running.notes_ = running.start(ray_kit.both, ("grid", "flat", "trio", *ray_kit.PPO))
    running.keep_logs(log_dir)
    yield running
    running.close()


@pytest.fixture
def roles(transport):
    made = RoleSet(transport.handles_)
    for name in ("grid", "flat", "trio"):
        getattr(made, name).seen().gather()
    transport.take_seconds()
    return made


@pytest.fixture(scope="module")
def rollout():
    return ray_kit.generated(ray_kit.prompts_of(5))


def same(a, b):
    """Equality of everything inside two values."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (Ragged, Sequences)) or hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in a.__dataclass_fields__)
    return a == b


# ---- starting ----


def test_every_rank_has_a_group_of_its_pool_and_threads_of_its_own(roles):
    assert roles.grid.group_size().gather() == 4
    assert roles.trio.group_size().gather() == 3
    assert roles.grid.environment("OMP_NUM_THREADS").gather() == "1"
    assert roles.grid.environment("OMP_WAIT_POLICY").gather() == "PASSIVE"


def test_notes_of_all_ranks_arrive_once(transport):
    assert transport.notes_ == ("every role is a toy", "rank 0", "rank 1", "rank 2", "rank 3")


def test_unknown_methods_and_roles_name_the_closest(transport, roles):
    with pytest.raises(AttributeError, match=r"the grid role has no method doubel\. Did you mean double"):
        _ = roles.grid.doubel
    with pytest.raises(ConfigError, match=r"gird is not a role of this run\. Did you mean grid"):
        transport.handle("gird")


# ---- dispatch ----


def test_all_reaches_every_rank_and_the_first_replies(roles):
    assert roles.trio.add(torch.tensor([1.0, 2.0]), b=1).gather().tolist() == [2, 3]
    assert [[(a.tolist(), b) for a, b in rank] for rank in roles.trio.seen().gather()] == [[([1, 2], 1)]] * 3


def test_each_gives_a_rank_its_entry_and_collects_all_replies(roles):
    assert roles.grid.who().gather() == [0, 1, 2, 3]
    assert roles.trio.echo(["a", "b", "c"]).gather() == [(0, "a"), (1, "b"), (2, "c")]
    with pytest.raises(ShapeError, match=r"trio\.echo takes lists of 3 entries"):
        roles.trio.echo(["a", "b"])


def test_the_result_of_each_goes_to_the_rank_it_came_from(roles):
    first = roles.trio.echo(["a", "b", "c"])
    assert roles.trio.echo(first).gather() == [(0, (0, "a")), (1, (1, "b")), (2, (2, "c"))]
    assert roles.grid.add(first, []).gather() == [(0, "a"), (1, "b"), (2, "c")]


@pytest.mark.parametrize("role", ["trio", "grid", "flat"])
@pytest.mark.parametrize("pending", [False, True], ids=["driver-value", "pending"])
def test_rows_come_back_in_their_order(roles, transport, rollout, role, pending):
    given = roles.trio.spread(ray_kit.prompts_of(5)) if pending else transport.put(rollout)
    expected = rollout.sequences.responses()
    out = getattr(roles, role).double(given).gather()
    assert torch.equal(out.flat, expected.flat.float() * 2)
    assert torch.equal(out.lens, expected.lens)
    names = [f"p{i}/{s}" for i in range(5) for s in range(2)]
    assert getattr(roles, role).ids(given).gather() == names


def test_peers_get_the_same_rows_and_data_ranks_split_them_by_tokens(roles, transport, rollout):
    roles.grid.double(transport.put(rollout)).gather()
    seen = [rank[0] for rank in roles.grid.seen().gather()]
    assert seen[0] == seen[1] != seen[2] == seen[3]
    parts = balanced(rollout.item_tokens(), 2)
    assert seen[0::2] == [tuple(rollout.prompt_ids[i] for i in part) for part in parts]


def test_pending_rows_are_split_by_the_ranks_as_the_driver_would(roles, rollout):
    roles.trio.double(roles.grid.spread(ray_kit.prompts_of(5))).gather()
    seen = [rank[0] for rank in roles.trio.seen().gather()]
    parts = balanced(rollout.item_tokens(), 3)
    assert seen == [tuple(rollout.prompt_ids[i] for i in part) for part in parts]


@pytest.mark.parametrize("pending", [False, True], ids=["driver-value", "pending"])
def test_ranks_without_rows_take_part_and_are_not_in_the_result(roles, transport, pending):
    prompts = ray_kit.prompts_of(2, n=1)
    given = roles.trio.spread(prompts) if pending else transport.put(ray_kit.generated(prompts))
    assert roles.flat.ids(given).gather() == ["p0/0", "p1/0"]
    roles.flat.double(given).gather()
    seen = [rank[0] for rank in roles.flat.seen().gather()]
    assert sorted(seen) == [("p0",), ("p0",), ("p0",), ("p1",)]


def test_an_empty_batch_gives_an_empty_result(roles, transport, rollout):
    none = rollout.select(torch.zeros(0, dtype=torch.int64))
    out = roles.trio.double(transport.put(none))
    assert len(out.gather()) == 0
    assert roles.grid.size(roles.grid.whole(none)).gather() == 0


def test_columns_with_the_rows_of_the_batch_are_split_with_it_and_others_stay_whole(roles, transport, rollout):
    factor = torch.arange(10.0)
    out = roles.trio.scale(factor, transport.put(rollout), torch.ones(4)).gather()
    assert torch.equal(out, factor * rollout.sequences.tokens.lens * 4)
    seen = [rank[0] for rank in roles.trio.seen().gather()]
    assert torch.equal(torch.cat([f for f, _ in seen]).sort().values, factor)
    assert [len(constant) for _, constant in seen] == [4, 4, 4]


def test_generate_splits_prompts_over_all_ranks_and_counts_groups_over_the_whole(roles):
    prompts = ray_kit.prompts_of(5, n=3)
    out = roles.flat.spread(prompts).gather()
    assert same(out, ray_kit.generated(prompts))
    assert out.group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    seen = [rank[0] for rank in roles.flat.seen().gather()]
    assert sorted(name for ids in seen for name in ids) == [f"p{i}" for i in range(5)]


def test_pairs_reply_with_all_chosen_before_all_rejected(roles, transport):
    chosen = Sequences.build([[1]] * 5, [[i] * (i + 1) for i in range(5)])
    rejected = Sequences.build([[1]] * 5, [[10 * i] for i in range(5)])
    pairs = Pairs(chosen, rejected, torch.zeros(5), tuple("abcde"))
    expected = [1 + i * (i + 1) for i in range(5)] + [1 + 10 * i for i in range(5)]
    assert roles.trio.pair_scores(transport.put(pairs)).gather().tolist() == expected


@pytest.mark.parametrize("pending", [False, True], ids=["driver-value", "pending"])
def test_a_minibatch_is_shared_with_the_weights_of_the_whole(roles, transport, rollout, pending):
    given = roles.trio.spread(ray_kit.prompts_of(5)) if pending else rollout
    out = roles.grid.learn(given, ray_kit.TokenLoss()).gather()
    shares = [rank[0] for rank in roles.grid.seen().gather()]
    parts = balanced(rollout.item_tokens(), 2)
    assert [s.index.tolist() for s in shares] == [p.tolist() for p in (parts[0], parts[0], parts[1], parts[1])]
    assert sum(float(s.weights.flat.sum()) for s in shares[::2]) == pytest.approx(1)
    assert out["rows"].total == len(parts[0])


def test_replies_that_do_not_fit_their_protocol_are_refused(roles, transport, rollout):
    given = transport.put(rollout)
    assert roles.trio.nothing(given).gather() is None
    with pytest.raises(ShapeError, match=r"trio\.no_rows is split by rows, and a rank replied with dict"):
        roles.trio.no_rows(given).gather()
    with pytest.raises(ShapeError, match=r"trio\.too_few got \d rows and replied with \d"):
        roles.trio.too_few(given).gather()
    with pytest.raises(ShapeError, match=r"trio\.double is split by rows, but none of its 1 arguments has rows"):
        roles.trio.double(3)


# ---- results that stay on the cluster ----


def test_columns_with_other_parts_than_the_batch_are_joined_row_by_row(roles, rollout):
    batch = roles.trio.spread(ray_kit.prompts_of(5))
    grown = batch.adding(old_logp=roles.flat.double(batch), ref_logp=roles.grid.double(batch))
    again = roles.trio.double(grown.adding(finished=torch.ones(10, dtype=torch.bool)))
    assert torch.equal(again.gather().flat, rollout.sequences.responses().flat.float() * 2)
    whole = roles.grid.whole(grown).gather()
    doubled = rollout.sequences.responses()
    expected = rollout.adding(
        old_logp=doubled.with_flat(doubled.flat.float() * 2), ref_logp=doubled.with_flat(doubled.flat.float() * 2)
    )
    assert same(whole, expected)
    assert same(grown.gather(), expected)


def test_a_column_of_another_length_is_refused(roles, rollout):
    batch = roles.trio.spread(ray_kit.prompts_of(5))
    short = roles.trio.double(roles.trio.spread(ray_kit.prompts_of(3)))
    with pytest.raises(ShapeError, match="column old_logp has 6 rows, the batch has 10"):
        roles.grid.double(batch.adding(old_logp=short)).gather()


def test_ppo_collects_what_the_local_transport_collects_and_the_driver_moves_no_tensor(transport, roles):
    prompts, local = ray_kit.prompts_of(7, n=3), LocalTransport()
    cfg = PPOConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"model": "r"}})
    expected = ppo.collect(local.put(prompts), RoleSet(local.start(ray_kit.ppo_roles, ray_kit.PPO)[0]), cfg).gather()
    transport.take_busy()
    before = transport.driver_bytes
    pending = ppo.collect(transport.put(prompts), roles, cfg)
    assert transport.driver_bytes == before
    found = pending.gather()
    assert same(found, expected)
    assert isinstance(found, Rollout)
    columns = (found.old_logp, found.ref_logp, found.value)
    assert transport.driver_bytes - before > sum(c.flat.numel() * 4 for c in columns)
    assert set(transport.take_busy()) == {"grid", "trio"}


def test_driver_bytes_counts_arguments_once_and_what_is_gathered(transport, roles):
    before = transport.driver_bytes
    pending = roles.trio.add(torch.zeros(100), 1)
    assert transport.driver_bytes - before == 400
    pending.gather()
    assert transport.driver_bytes - before == 800


# ---- time ----


def test_calls_on_two_pools_run_at_the_same_time(roles, tmp_path):
    first = roles.grid.meet(str(tmp_path), "grid", "trio")
    second = roles.trio.meet(str(tmp_path), "trio", "grid")
    assert first.gather()
    assert second.gather()


def test_a_chain_is_sent_without_waiting_for_its_start(roles, tmp_path):
    """The second call reads the first one's result; both are sent before the file that lets the first end."""
    first = roles.trio.meet(str(tmp_path), "first", "driver")
    second = roles.grid.add(first, 1)
    (tmp_path / "driver").touch()
    assert second.gather() == 2


def test_seconds_are_those_of_roles_that_ran(transport, roles, rollout):
    roles.trio.nap(0.01).gather()
    transport.call(len, transport.put(rollout))
    seconds = transport.take_seconds()
    assert set(seconds) == {("trio", "nap"), ("controller", "len")}
    assert seconds["trio", "nap"] >= 0.01
    assert transport.take_seconds() == {}


def test_controller_mathematics_runs_on_gathered_values(transport, roles):
    total, product = transport.call(lambda a, b: (a + b, a * b), roles.trio.add(2, 3), 4, outputs=2)
    assert (total.gather(), product.gather()) == (9, 20)


# ---- what the ranks say ----


def test_progress_and_output_of_every_rank_arrive_with_a_prefix(transport, roles, progress, log_dir):
    roles.trio.work(4).gather()
    transport.watch.drain()
    assert ("toy work", 12, 12) in progress  # three ranks, four each
    lines = (log_dir / "workers.log").read_text().splitlines()
    for rank in range(3):
        said = [line for line in lines if line.startswith(f"[trio {rank}@") and line.endswith(f"hello from {rank}")]
        assert len(said) == 1
        assert any(line.startswith(f"[trio {rank}@") and "careful now" in line for line in lines)


def test_a_folder_that_all_nodes_see_is_accepted(transport, tmp_path):
    transport.require_shared(tmp_path)
    assert list(tmp_path.iterdir()) == []
