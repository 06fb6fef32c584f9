"""Every transport: results are pending, arguments may be pending, and an algorithm file leaves its flow behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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


class Adder:
    def add(self, a, b=0):
        return a + b

    def fail(self):
        raise KeyError("inside")


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


@pytest.mark.parametrize("transport", [LocalTransport, RecordingTransport])
@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_results_cannot_be_read_before_they_are_gathered(touch, transport):
    result = transport().handle("adder", Adder()).add(1, b=2)
    with pytest.raises(PendingError, match=r"of the (pending result of adder\.add|recorded result) was read"):
        touch(result)


def test_a_local_result_is_gathered():
    assert LocalTransport().handle("adder", Adder()).add(1, b=2).gather() == 3


def test_local_pending_arguments_are_resolved_by_position_and_by_name():
    handle = LocalTransport().handle("adder", Adder())
    assert handle.add(handle.add(1, 2), b=handle.add(3)).gather() == 6


def test_local_errors_arrive_as_themselves_and_name_the_role():
    with pytest.raises(KeyError, match="inside") as caught:
        LocalTransport().handle("adder", Adder()).fail()
    assert caught.value.__notes__ == ["in adder.fail"]


def test_update_of_an_unknown_role_names_the_closest_one():
    roles = RoleSet({"critic": LocalTransport().handle("critic", Adder())})
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


@pytest.mark.parametrize("transport", [LocalTransport, RecordingTransport])
def test_every_transport_tells_where_the_time_went_and_begins_anew(transport):
    running = transport()
    running.handle("adder", Adder()).add(1, b=2)
    first = running.take_seconds()
    assert set(first) == ({("adder", "add")} if transport is LocalTransport else set())
    assert running.take_seconds() == {}
