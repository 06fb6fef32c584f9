"""Scores beside decoding: what overlaps, what comes back, when a generation is given up, and what an error leaves."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_kit as kit

from tutelage.errors import RolloutError
from tutelage.roles.actor import Actor
from tutelage.roles.parts import Parts
from tutelage.roles.reward import Reward
from tutelage.schedules import Synchronous
from tutelage.schedules.streaming import Enough, Streamed
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Prompts, Rollout, Scores, Stat

WAIT_S = 20.0


class PartsActor(kit.ToyActor):
    """Its groups end in the order `ends`, of places in the batch."""

    def __init__(self, *ends: int) -> None:
        super().__init__()
        self.ends = ends
        self.left: list[Rollout] = []
        self.asked = 0
        self.closed = 0
        self.begun = threading.Event()

    def generate(self, asked: Prompts) -> Rollout:
        return super().generate(asked).adding(group=torch.arange(len(asked)).repeat_interleave(asked.n))

    def begin_parts(self, asked: Prompts) -> None:
        whole = self.generate(asked)
        self.left = [whole.select(torch.nonzero(whole.group == place).squeeze(1)) for place in self.ends]

    def next_part(self) -> Rollout | None:
        self.asked += 1
        if self.asked == 2:
            self.begun.set()
        return self.left.pop(0) if self.left else None

    def close_parts(self) -> None:
        self.closed += 1
        self.left = []


def points(rollout: Rollout) -> torch.Tensor:
    """100 times the place of the prompt, and the number of the sample."""
    places = [int(name.split(".")[1]) for name in rollout.prompt_ids]
    return 100.0 * torch.tensor(places) + rollout.samples


@dataclass
class ToyReward:
    """Scores by prompt and sample.  seen: the groups of each call;  waits: for this before the first score."""

    waits: threading.Event | None = None
    fails: str | None = None
    seen: list[tuple[str, ...]] = field(default_factory=list)
    forgotten: list[tuple[str, int]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def score(self, rollout: Rollout) -> Scores:
        self.seen.append(tuple(dict.fromkeys(rollout.prompt_ids)))
        self.threads.add(threading.current_thread().name)
        if self.waits is not None and not self.waits.wait(WAIT_S):
            raise TimeoutError("nothing was decoded while this was scored")
        if self.fails in rollout.prompt_ids:
            raise ValueError("no score for you")
        total = points(rollout)
        errors = tuple("odd" if name.endswith("1") else "" for name in rollout.prompt_ids)
        return Scores(total[:, None], total, ("toy",), (1.0,), errors if any(errors) else None)

    def forget_errors(self, dropped: list[tuple[str, int]]) -> None:
        self.forgotten += dropped


def roles_of(actor: Any, reward: Any) -> tuple[RoleSet, LocalTransport]:
    transport = LocalTransport()
    return RoleSet({"actor": transport.handle("actor", actor), "reward": transport.handle("reward", reward)}), transport


def collect(batch: Any, roles: Any, cfg: Any) -> Any:
    rollout = roles.actor.generate(batch)
    return rollout.adding(old_logp=roles.actor.logprobs(rollout), score=roles.reward.score(rollout))


def same(one: Rollout, other: Rollout) -> None:
    assert one.prompt_ids == other.prompt_ids
    assert one.texts == other.texts
    for name in ("group", "samples"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.score is not None
    assert other.score is not None
    assert torch.equal(one.score.values, other.score.values)
    assert one.score.errors == other.score.errors


def test_everything_comes_back_in_the_order_of_the_prompts_and_is_scored_once() -> None:
    plain_roles, plain_transport = roles_of(PartsActor(), ToyReward())
    asked = kit.prompts(3, 3)
    expected = collect(plain_transport.put(asked), plain_roles, None).gather()
    actor, reward = PartsActor(2, 0, 1), ToyReward()
    roles, transport = roles_of(actor, reward)
    found = collect(transport.put(asked), Streamed(roles, transport), None).gather()
    same(found, expected)
    assert torch.equal(found.old_logp.flat, expected.old_logp.flat)
    assert reward.seen == [("3.2",), ("3.0",), ("3.1",)], "as they ended, and never again"
    assert reward.threads.isdisjoint({threading.current_thread().name})
    assert actor.closed == 1


def test_a_score_waits_while_the_next_group_is_decoded() -> None:
    """The first score is not given before the actor is asked a second time: one after the other, this would not end."""
    actor = PartsActor(0, 1)
    roles, transport = roles_of(actor, ToyReward(waits=actor.begun))
    found = collect(transport.put(kit.prompts(0, 2)), Streamed(roles, transport), None).gather()
    assert len(found) == 4
    assert {("actor", "next_part"), ("reward", "score")} <= transport.take_seconds().keys()


def test_what_was_not_streamed_is_scored_as_ever() -> None:
    actor, reward = PartsActor(0), ToyReward()
    roles, transport = roles_of(actor, reward)
    other = actor.generate(kit.prompts(5, 2))
    scores = Streamed(roles, transport).reward.score(transport.put(other)).gather()
    assert torch.equal(scores.total, points(other))
    assert reward.seen == [("5.0", "5.1")]


def test_roles_beside_actor_and_reward_are_themselves() -> None:
    roles, transport = roles_of(PartsActor(), ToyReward())
    streamed = Streamed(roles, transport)
    assert "reward" in streamed
    assert "critic" not in streamed
    assert streamed.names() == ("actor", "reward")
    with pytest.raises(AttributeError, match="no role critic"):
        _ = streamed.critic


def test_an_error_of_the_reward_arrives_and_the_generation_is_closed() -> None:
    actor = PartsActor(0, 1, 2)
    roles, transport = roles_of(actor, ToyReward(fails="0.1"))
    with pytest.raises(ValueError, match="no score for you"):
        collect(transport.put(kit.prompts(0, 3)), Streamed(roles, transport), None)
    assert actor.closed == 1
    assert [t for t in threading.enumerate() if t.name.startswith("scores")] == []


# ---- enough


def part(place: int) -> Rollout:
    whole = PartsActor().generate(kit.prompts(0, 6))
    return whole.select(torch.nonzero(whole.group == place).squeeze(1))


def test_enough_counts_from_the_first_prompt_on_without_a_gap() -> None:
    enough = Enough(2, lambda rows: int(rows.group[0]) not in (0, 2))
    counts = []
    for place in (3, 1, 0, 5, 2, 4):
        enough.tell(part(place))
        counts.append((enough.whole, enough.informative, enough.reached))
    # 0 is silent, 1 speaks, 2 is silent, 3 speaks: known when 2 is, and never past 3
    assert counts == [(0, 0, False), (0, 0, False), (2, 1, False), (2, 1, False), (4, 2, True), (4, 2, True)]


def test_a_generation_is_given_up_when_the_first_groups_are_enough() -> None:
    actor, reward = PartsActor(1, 0, 2, 3, 4, 5), ToyReward()
    roles, transport = roles_of(actor, reward)
    enough = Enough(2, lambda rows: True)
    found = collect(transport.put(kit.prompts(0, 6)), Streamed(roles, transport, enough), None).gather()
    assert found.group.tolist() == [0, 0, 1, 1]
    assert enough.whole == 2
    assert actor.closed == 1
    assert reward.seen[:2] == [("0.1",), ("0.0",)]


def test_nothing_more_is_decoded_once_the_scores_are_enough() -> None:
    """The third group is not asked for before the first two are scored; those behind it never are."""
    actor = PartsActor(0, 1, 2, 3, 4, 5)
    scored, asks = threading.Semaphore(0), actor.next_part

    class Counting(ToyReward):
        def score(self, rollout: Rollout) -> Scores:
            found = super().score(rollout)
            scored.release()
            return found

    def next_part() -> Rollout | None:
        if actor.asked >= 2:
            assert scored.acquire(timeout=WAIT_S)
        return asks()

    actor.next_part = next_part  # type: ignore[method-assign]
    roles, transport = roles_of(actor, Counting())
    enough = Enough(2, lambda rows: True)
    found = collect(transport.put(kit.prompts(0, 6)), Streamed(roles, transport, enough), None).gather()
    assert found.group.tolist() == [0, 0, 1, 1]
    assert actor.asked <= 4, "each later question comes after a score"


def test_errors_of_responses_that_nobody_keeps_are_forgotten() -> None:
    reward = ToyReward()
    roles, transport = roles_of(PartsActor(2, 1, 0), reward)
    collect(transport.put(kit.prompts(0, 3)), Streamed(roles, transport, Enough(1, lambda rows: True)), None)
    assert set(reward.forgotten) == {("0.1", 0), ("0.1", 1), ("0.2", 0), ("0.2", 1)}
    kept = Reward(SimpleNamespace())  # type: ignore[arg-type]
    kept.errors = [{"id": name, "sample": k} for name in ("0.0", "0.1") for k in (0, 1)]
    kept.forget_errors([("0.1", 0), ("0.0", 7)])
    assert [(one["id"], one["sample"]) for one in kept.errors] == [("0.0", 0), ("0.0", 1), ("0.1", 1)]


def test_responses_that_were_changed_are_scored_anew() -> None:
    reward = ToyReward()
    roles, transport = roles_of(PartsActor(0, 1), reward)
    streamed = Streamed(roles, transport)
    rollout = streamed.actor.generate(transport.put(kit.prompts(0, 2)))
    more = rollout.adding(old_logp=roles.actor.logprobs(rollout))
    calls = len(reward.seen)
    streamed.reward.score(more)
    assert len(reward.seen) == calls
    streamed.reward.score(more.adding(texts=("other",) * 4))
    assert len(reward.seen) == calls + 1


def test_slow_scores_do_not_change_what_a_generation_gives() -> None:
    """All groups have ended before the first score is known: those behind the last that is needed are dropped."""
    actor = PartsActor(3, 2, 1, 0)
    late = threading.Event()
    asks = actor.next_part

    def next_part() -> Rollout | None:
        found = asks()
        if found is None:
            late.set()
        return found

    actor.next_part = next_part  # type: ignore[method-assign]
    reward = ToyReward(waits=late)
    roles, transport = roles_of(actor, reward)
    enough = Enough(2, lambda rows: int(rows.group[0]) != 1)
    found = collect(transport.put(kit.prompts(0, 4)), Streamed(roles, transport, enough), None).gather()
    assert found.group.tolist() == [0, 0, 1, 1, 2, 2]


def algorithm(says: Any) -> Any:
    return SimpleNamespace(
        **{**vars(kit.TOY), "collect": collect},
        refills=lambda cfg: 4,
        informative=lambda batch, cfg: torch.tensor([says(name) for name in batch.prompt_ids]),
        generated_stats=lambda batch, cfg: {"reward/generated": Stat(float(len(batch)), 1)},
        fewest_rows=lambda cfg: 1,
    )


@pytest.mark.parametrize("ends", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_a_step_learns_from_the_same_groups_whether_it_streams_or_not(ends: tuple[int, ...]) -> None:
    def run(stream: bool) -> Any:
        roles, transport = roles_of(PartsActor(*ends), ToyReward())
        cfg = SimpleNamespace(schedule=SimpleNamespace(stream=stream))
        made = Synchronous(algorithm(lambda name: name not in ("0.0", "0.2", "1.1")), transport, roles, cfg)
        return made.advance(kit.Supply(9, count=3), kit.ToyState(0))

    plain, streamed = run(False), run(True)
    same(streamed.batch, plain.batch)
    assert streamed.batch.prompt_ids == ("0.1", "0.1", "1.0", "1.0", "1.2", "1.2")
    names = plain.stats.keys() - {"schedule/groups_generated", "schedule/groups_informative_fraction"}
    assert "schedule/groups_given_up" not in plain.stats
    assert streamed.stats["schedule/groups_given_up"].mean == 0
    assert all(streamed.stats[name] == plain.stats[name] for name in names)


def test_groups_that_are_given_up_are_counted_and_no_surplus_is_left() -> None:
    roles, transport = roles_of(PartsActor(0, 1, 2), ToyReward())
    cfg = SimpleNamespace(schedule=SimpleNamespace(stream=True))
    made = Synchronous(algorithm(lambda name: name != "0.0"), transport, roles, cfg)
    result = made.advance(kit.Supply(9, count=3), kit.ToyState(0))
    assert result is not None
    assert tuple(dict.fromkeys(result.batch.prompt_ids)) == ("0.1", "0.2", "1.0")
    assert result.stats["schedule/groups_given_up"].mean == 2, "1.1 and 1.2"
    assert result.stats["schedule/groups_surplus"].mean == 0
    assert result.stats["schedule/groups_generated"].mean == 4


# ---- the actor's side


class Stream:
    """An engine whose stream says when it is closed."""

    def __init__(self) -> None:
        self.open = False

    def stream(self, prompts: Prompts) -> Any:
        self.open = True
        try:
            yield from (part(place) for place in range(len(prompts)))
        finally:
            self.open = False


def test_parts_come_one_by_one_and_are_closed() -> None:
    engine, parts = Stream(), Parts()
    parts.begin(engine, kit.prompts(0, 2))
    first, second = parts.next(), parts.next()
    assert first is not None
    assert second is not None
    assert (first.group.tolist(), second.group.tolist()) == ([0, 0], [1, 1])
    assert parts.next() is None
    parts.begin(engine, kit.prompts(0, 2))
    parts.next()
    assert engine.open
    parts.close()
    assert not engine.open
    parts.close()
    with pytest.raises(RolloutError, match="no generation in parts is open"):
        parts.next()


def test_a_generation_that_an_error_left_open_is_given_up_by_the_next() -> None:
    engine, other, parts = Stream(), Stream(), Parts()
    parts.begin(engine, kit.prompts(0, 2))
    parts.next()
    parts.begin(other, kit.prompts(0, 2))
    assert not engine.open
    assert parts.next() is not None


def test_an_engine_without_a_stream_is_refused() -> None:
    actor = Actor(SimpleNamespace(), kit.ToyActor(), 1.0, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match="ToyActor generates whole batches only") as caught:
        actor.begin_parts(kit.prompts(0, 1))
    assert "schedule.stream" in str(caught.value.fix)


# ---- errors of single responses


def test_scores_with_and_without_errors_are_joined() -> None:
    total = torch.tensor([1.0, 2.0])
    good = Scores(total[:, None], total, ("toy",), (1.0,))
    bad = replace(good, errors=("", "odd"))
    assert Scores.concat([good, good]).errors is None
    assert Scores.concat([good, bad]).errors == ("", "", "", "odd")
    assert Scores.concat([bad, good]).errors == ("", "odd", "", "")
    assert Scores.concat([good, bad]).valid.tolist() == [True, True, True, False]
