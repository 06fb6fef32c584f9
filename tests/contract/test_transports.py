"""Every transport: results are pending, arguments may be pending, and an algorithm file leaves its flow behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray_kit
import torch

from tutelage.algorithms import ALGORITHMS
from tutelage.config import PPOConfig
from tutelage.errors import ConfigError, PendingError, RolloutError
from tutelage.roles.actor import Actor
from tutelage.roles.critic import Critic
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.schedules import Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet

TOUCHES = {
    "attribute": lambda p: p.shape,
    "len": len,
    "bool": bool,
    "item": lambda p: p[0],
    "iteration": lambda p: [*p],
    "membership": lambda p: 3 in p,
    "equal": lambda p: p == 3,
    "equal to itself": lambda p: p == p,
    "unequal": lambda p: p != 3,
    "hash": lambda p: {p: 1},
}


RUNNING = ("local", "ray")
EVERY = (*RUNNING, "recording")


@pytest.fixture(scope="module")
def ray_adders():
    """One rank on the session's Ray, for all tests of this file."""
    pytest.importorskip("ray")
    from tutelage.transport.ray import ray_transport

    ray_kit.shared_ray()
    running = ray_transport(ray_kit.cluster())
    running.start(ray_kit.adders, ("adder",))
    yield running
    running.close()


@pytest.fixture
def start(request):
    """kind -> (transport, handle of an Adder)."""

    def started(kind):
        if kind == "ray":
            transport = request.getfixturevalue("ray_adders")
            transport.take_seconds(), transport.take_busy()
            return transport, transport.handle("adder")
        transport = LocalTransport() if kind == "local" else RecordingTransport({"adder": ray_kit.Adder})
        return transport, transport.start(ray_kit.adders, ("adder",))[0]["adder"]

    return started


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_results_cannot_be_read_before_they_are_gathered(touch, kind, start):
    result = start(kind)[1].add(1, b=2)
    with pytest.raises(PendingError, match=r"of the (pending result of adder\.add|recorded result) was read"):
        touch(result)


@pytest.mark.parametrize("kind", ["local", "recording"])
def test_roles_are_built_by_start_where_anything_runs(kind):
    transport = LocalTransport() if kind == "local" else RecordingTransport({"adder": ray_kit.Adder})
    handles, notes = transport.start(ray_kit.adders, ("adder",))
    assert (list(handles), notes) == (["adder"], ("built",) if kind == "local" else ())
    transport.close()


@pytest.mark.parametrize("kind", EVERY)
def test_a_method_that_a_role_has_not_is_refused_where_it_is_named(kind, start):
    with pytest.raises(AttributeError, match="subtract"):
        _ = start(kind)[1].subtract


@pytest.mark.parametrize("kind", RUNNING)
def test_a_result_is_gathered(kind, start):
    assert start(kind)[1].add(1, b=2).gather() == 3


@pytest.mark.parametrize("kind", RUNNING)
def test_pending_arguments_are_resolved_by_position_and_by_name(kind, start):
    handle = start(kind)[1]
    assert handle.add(handle.add(1, 2), b=handle.add(3)).gather() == 6


@pytest.mark.parametrize("kind", RUNNING)
def test_errors_arrive_as_themselves_and_name_the_role_once(kind, start):
    handle = start(kind)[1]
    with pytest.raises(KeyError, match="inside") as caught:
        handle.fail().gather()
    assert [note.partition(",")[0] for note in caught.value.__notes__ if "Traceback" not in note] == ["in adder.fail"]
    assert handle.add(1).gather() == 1


@pytest.mark.parametrize("kind", RUNNING)
def test_a_call_on_each_rank_takes_and_gives_a_list(kind, start):
    assert start(kind)[1].entry(["mine"]).gather() == ["mine"]


@pytest.mark.parametrize("kind", RUNNING)
def test_controller_values_flow_through_roles_and_mathematics(kind, start):
    transport, handle = start(kind)
    quotient, rest = transport.call(divmod, handle.add(transport.put(16), 1), transport.put(5), outputs=2)
    assert (quotient.gather(), handle.add(rest, 1).gather()) == (3, 3)


@pytest.mark.parametrize("kind", RUNNING)
def test_a_batch_takes_pending_columns_and_is_passed_on_with_them(kind, start):
    transport, handle = start(kind)
    rollout = ray_kit.generated(ray_kit.prompts_of(3))
    expected = rollout.sequences.responses()
    for batch in (handle.batch(), transport.put(rollout)):
        grown = batch.adding(old_logp=handle.lengths(batch), finished=torch.zeros(6, dtype=torch.bool))
        assert torch.equal(handle.lengths(grown).gather().flat, expected.flat)
        found = grown.gather()
        assert torch.equal(found.old_logp.flat, expected.flat)
        assert torch.equal(found.old_logp.lens, expected.lens)
        assert not found.finished.any()
        assert found.texts == rollout.texts


def test_update_of_an_unknown_role_names_the_closest_one():
    roles = RoleSet({"critic": LocalTransport().handle("critic", ray_kit.Adder())})
    with pytest.raises(ConfigError, match="Did you mean critic"):
        roles.update(None, critik=None)


@pytest.fixture
def ppo_config():
    return PPOConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train": "d"}, "ppo": {"epochs": 2, "minibatches": 3}}
    )


def test_recording_ppo_finds_the_six_steps_and_their_data_flow(ppo_config):
    transport = RecordingTransport()
    classes = {"actor": Actor, "critic": Critic, "reference": Reference, "reward": Reward}
    roles = RoleSet({name: transport.handle(name, cls) for name, cls in classes.items()})
    algorithm = ALGORITHMS["ppo"]
    Synchronous(algorithm, transport, roles, ppo_config).step("prompts", algorithm.initial_state(ppo_config))
    calls = [(n.role, n.method, n.inputs) for n in transport.nodes]
    assert calls[:6] == [
        ("actor", "generate", ()),
        ("actor", "logprobs", (0,)),
        ("reference", "logprobs", (0,)),
        ("critic", "values", (0,)),
        ("reward", "score", (0,)),
        ("controller", "advantages", (0, 1, 2, 3, 4)),
    ]
    assert calls[6:18] == [("actor", "step", (5,)), ("critic", "step", (5,))] * 6
    assert [c[:2] for c in calls[18:]] == [("actor", "publish"), ("controller", "merged_by_role")]


def test_recording_refuses_to_look_at_data():
    transport = RecordingTransport()
    with pytest.raises(PendingError, match="recording holds no data"):
        _ = transport.handle("actor", Actor).generate("p").sequences
    with pytest.raises(AttributeError, match="no method genrate"):
        transport.handle("actor", Actor).genrate("p")


class FailsLater:
    """The result of a call that is sent off, and whose error arrives when it is gathered."""

    def gather(self):
        raise RolloutError("the new weights did not arrive")


class Remote:
    def __init__(self):
        self.versions = []

    def publish(self, version):
        self.versions.append(version)
        return FailsLater()


def test_a_publication_that_fails_is_not_missed():
    actor = Remote()
    algorithm = SimpleNamespace(
        PUBLISHED=("actor",),
        PREFIXES={},
        collect=lambda batch, roles, cfg: batch,
        advantages=lambda batch, state, cfg: (batch, SimpleNamespace(step=state.step + 1), {}),
        learn=lambda batch, roles, cfg, state: [],
    )
    schedule = Synchronous(algorithm, LocalTransport(), RoleSet({"actor": actor}), None)
    with pytest.raises(RolloutError, match="the new weights did not arrive"):
        schedule.step("prompts", SimpleNamespace(step=6))
    assert actor.versions == [7]


@pytest.mark.parametrize("kind", EVERY)
def test_every_transport_tells_where_the_time_went_and_begins_anew(kind, start):
    transport, handle = start(kind)
    handle.add(1, b=2).gather()
    assert set(transport.take_seconds()) == (set() if kind == "recording" else {("adder", "add")})
    assert set(transport.take_busy()) == (set() if kind == "recording" else {"main"})
    assert transport.take_seconds() == {}
    assert transport.take_busy() == {}
