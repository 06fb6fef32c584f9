"""When each schedule generates, learns and publishes, on a toy policy; and that a resumed one repeats the rest."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_kit as kit
from safetensors.torch import load_file, save_file

from tutelage.algorithms import ALGORITHMS
from tutelage.engines.state import flatten, unflatten
from tutelage.errors import CheckpointError, ConfigError, RolloutError, TrainingError
from tutelage.rollout.partial import Carried, samples_of
from tutelage.schedules import BoundedAsync, OneStepOff, Synchronous, make_schedule
from tutelage.schedules.asked import Asked, Call, sorted_out
from tutelage.schedules.saved import packed, packed_samples, unpacked, unpacked_samples
from tutelage.schedules.training import staleness_stats
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Prompts, Ragged, Rollout, Scores

LOOKING_AHEAD = {
    "one step off": (OneStepOff, {}),
    "asynchronous": (BoundedAsync, {"max_staleness": 2}),
    "partial": (BoundedAsync, {"max_staleness": 2, "partial_tokens": 20}),
}


def batches(results: list[Any]) -> list[tuple[str, ...]]:
    return [tuple(dict.fromkeys(r.batch.prompt_ids)) for r in results]


def ids(step: int) -> tuple[str, ...]:
    return kit.prompts(step).ids


def test_synchronous_generates_learns_and_publishes_in_turn() -> None:
    schedule, actor = kit.toy(Synchronous)
    results, state = kit.run(schedule, kit.Supply(2), 5)
    assert [what for what, _ in actor.log] == ["generate", "logprobs", "step", "publish"] * 2
    assert [r.batch.weights_version.tolist() for r in results] == [[0] * 4, [1] * 4]
    assert state.step == 2


def test_one_step_off_generates_the_next_batch_before_it_learns_on_this_one() -> None:
    schedule, actor = kit.toy(OneStepOff)
    results, _ = kit.run(schedule, kit.Supply(4), 9)
    expected = [("generate", ids(0))]
    for step in range(4):
        ahead = [("generate", ids(step + 1))] if step < 3 else []
        expected += [*ahead, ("logprobs", ids(step)), ("step", ids(step)), ("publish", step + 1)]
    assert actor.log == expected
    assert kit.numbers(results, "schedule/staleness_mean") == [0, 1, 1, 1]
    assert kit.numbers(results, "schedule/staleness_max") == [0, 1, 1, 1]
    assert kit.numbers(results, "schedule/buffered") == [2, 2, 2, 0]


def test_old_logprobs_of_a_stale_rollout_are_those_of_the_weights_it_updates() -> None:
    schedule, _ = kit.toy(OneStepOff)
    (first, second), _ = kit.run(schedule, kit.Supply(3), 2)
    before_second = first.stats["policy/w"].mean
    assert second.batch.old_logp.flat.unique().tolist() == pytest.approx([-before_second])
    assert second.batch.rollout_logp.flat.unique().tolist() == [-0.5], "sampled under the weights of the start"


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_generation_ahead_is_not_waited_for_while_learning(name: str) -> None:
    log: list[tuple[str, Any]] = []
    transport = kit.Watched(log)
    make, kwargs = LOOKING_AHEAD[name]
    actor = kit.ToyActor(log)
    schedule = make(kit.TOY, transport, RoleSet({"actor": transport.handle("actor", actor)}), None, **kwargs)
    kit.run(schedule, kit.Supply(6), 1)
    asked = sum(what.startswith("generate") for what, _ in log)
    waited = sum(what == "gather" and str(method).startswith("generate") for what, method in log)
    assert waited < asked, "something is still in flight"
    assert ("gather", "publish") not in log, "the publication is waited for when the next one is sent"
    if name != "partial":
        assert waited == (0 if name == "one step off" else 1)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_bounded_asynchrony_runs_ahead_to_its_limit_and_no_further(limit: int) -> None:
    schedule, actor = kit.toy(BoundedAsync, max_staleness=limit)
    supply = kit.Supply(8)
    most = []
    state = kit.ToyState(0)
    results = []
    while (result := schedule.advance(supply, state)) is not None:
        results.append(result)
        state = result.state
        most.append(supply.taken - state.step)
    assert batches(results) == [ids(step) for step in range(8)], "every prompt once, in its order"
    ages = kit.numbers(results, "schedule/staleness_max")
    assert ages == [min(step, limit) for step in range(8)]
    assert most == [min(limit, 7 - step) for step in range(8)], "backpressure"
    assert kit.numbers(results, "schedule/dropped") == [0] * 8
    assert [what for what, _ in actor.log].count("generate") == 8


def test_a_limit_of_one_is_one_step_off() -> None:
    one, asynchronous = kit.toy(OneStepOff)[0], kit.toy(BoundedAsync, max_staleness=1)[0]
    ours, _ = kit.run(one, kit.Supply(6), 6)
    theirs, _ = kit.run(asynchronous, kit.Supply(6), 6)
    assert kit.numbers(ours, "policy/w") == kit.numbers(theirs, "policy/w")


@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("budget", [1, 7, 20, 40, 10_000])
def test_partial_rollouts_are_carried_over_and_still_keep_the_limit(limit: int, budget: int) -> None:
    schedule, _ = kit.toy(BoundedAsync, max_staleness=limit, partial_tokens=budget)
    results, _ = kit.run(schedule, kit.Supply(12, count=3), 99)
    learned = [name for batch in batches(results) for name in batch]
    assert len(results) == 12
    assert all(len(batch) == 3 for batch in batches(results))
    assert sorted(learned) == sorted(f"{s}.{i}" for s in range(12) for i in range(3)), "every prompt exactly once"
    assert max(kit.numbers(results, "schedule/staleness_max")) <= limit
    assert kit.numbers(results, "schedule/dropped") == [0] * 12
    if budget in (1, 7, 20, 10_000):  # at 40 some limits leave nothing
        assert (sum(kit.numbers(results, "schedule/carried")) == 0) == (budget == 10_000)
    for result in results:
        rows, names = result.batch.sequences.response_rows(), result.batch.prompt_ids
        assert [len(r) for r in rows] == [
            kit.length(n, s) for n, s in zip(names, result.batch.samples.tolist(), strict=True)
        ]
        assert result.batch.samples.tolist() == [0, 1] * 3
        assert result.batch.group.tolist() == [0, 0, 1, 1, 2, 2], "groups are numbered anew in a joined batch"
        assert names == tuple(name for name in dict.fromkeys(names) for _ in range(2))


def test_short_answers_overtake_long_ones_only_while_these_can_wait() -> None:
    schedule, _ = kit.toy(BoundedAsync, max_staleness=3, partial_tokens=20)
    results, _ = kit.run(schedule, kit.Supply(12, count=3), 99)
    assert batches(results) != [kit.prompts(s, 3).ids for s in range(12)], "the order is not first come, first served"
    mixed = [r for r in results if len({int(name.split(".")[0]) for name in r.batch.prompt_ids}) > 1]
    assert mixed, "a batch holds prompts that were asked for in different steps"


def test_a_carried_response_has_tokens_of_several_weights_and_the_version_of_the_oldest() -> None:
    schedule, _ = kit.toy(BoundedAsync, max_staleness=3, partial_tokens=20)
    results, _ = kit.run(schedule, kit.Supply(12, count=3), 99)
    spans = [
        (len(set(row.tolist())), int(version))
        for r in results
        for row, version in zip(r.batch.rollout_logp.rows(), r.batch.weights_version, strict=True)
    ]
    assert max(count for count, _ in spans) > 1
    published = [0.5, *kit.numbers(results, "policy/w")]
    for r in results:
        for row, version in zip(r.batch.rollout_logp.rows(), r.batch.weights_version.tolist(), strict=True):
            assert row[0].item() == pytest.approx(-published[version])


def test_rollouts_that_carry_too_old_weights_are_dropped_counted_and_asked_for_again() -> None:
    actor = kit.ToyActor()
    schedule, _ = kit.toy(BoundedAsync, actor, max_staleness=1)
    supply = kit.Supply(6)
    (first,), state = kit.run(schedule, supply, 1)
    actor.lag = 1  # batch 2 is sampled before its publication arrives: version 0, to be learned from at version 2
    (second,), state = kit.run(schedule, supply, 1, state)
    actor.lag = 0
    later, _ = kit.run(schedule, supply, 9, state)
    assert kit.numbers([first, second, *later], "schedule/dropped") == [0, 0, 2, 0, 0, 0]
    assert batches(later) == [ids(3), ids(2), ids(4), ids(5)], "the prompts are not lost"
    assert later[1].batch.weights_version.tolist() == [2] * 4, "sampled again, with the weights of that moment"
    assert max(kit.numbers(later, "schedule/staleness_max")) == 1


def test_an_engine_that_never_takes_the_weights_stops_the_run_instead_of_asking_for_ever() -> None:
    actor = kit.ToyActor(lag=5)
    schedule, _ = kit.toy(BoundedAsync, actor, max_staleness=2)
    with pytest.raises(TrainingError, match=r"asked for at weight version 0 carry version -5; .*max_staleness is 2"):
        kit.run(schedule, kit.Supply(6), 3)


@pytest.mark.parametrize("name", LOOKING_AHEAD)
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_resumed_schedule_repeats_the_rest_exactly(name: str, stop: int, tmp_path: Path) -> None:
    make, kwargs = LOOKING_AHEAD[name]
    whole, _ = kit.run(kit.toy(make, **kwargs)[0], kit.Supply(8, count=3), 8)
    schedule, actor = kit.toy(make, **kwargs)
    supply = kit.Supply(8, count=3)
    _, state = kit.run(schedule, supply, stop)
    tensors, plain = flatten({"schedule": schedule.state(), "actor": actor.state()})
    save_file(tensors, tmp_path / "state.safetensors")
    drawn = supply.taken
    continued, _ = kit.run(schedule, supply, 8, state)

    later, fresh = kit.toy(make, **kwargs)
    saved = unflatten(load_file(tmp_path / "state.safetensors"), plain)
    later.load_state(saved["schedule"])
    fresh.load_state(saved["actor"])
    fresh.publish(stop)
    resumed, _ = kit.run(later, kit.Supply(8, begin=drawn, count=3), 8, state)
    for again in (continued, resumed):
        assert kit.numbers(again, "policy/w") == kit.numbers(whole[stop:], "policy/w"), "a checkpoint changes nothing"
        assert batches(again) == batches(whole[stop:])
        for metric in ("schedule/staleness_mean", "schedule/staleness_max", "schedule/buffered"):
            assert kit.numbers(again, metric) == kit.numbers(whole[stop:], metric)


class FailsLater:
    def gather(self) -> None:
        raise RolloutError("the new weights did not arrive")


class Remote:
    """An actor handle whose publications fail after they were sent off."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def publish(self, version: int) -> FailsLater:
        return FailsLater()


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_a_publication_that_fails_is_reported_by_the_next_step_or_checkpoint(name: str) -> None:
    make, kwargs = LOOKING_AHEAD[name]
    for finish in (lambda s, d, state: s.advance(d, state), lambda s, d, state: s.state()):
        transport = LocalTransport()
        roles = RoleSet({"actor": Remote(transport.handle("actor", kit.ToyActor()))})
        schedule, supply = make(kit.TOY, transport, roles, None, **kwargs), kit.Supply(4)
        result = schedule.advance(supply, kit.ToyState(0))
        with pytest.raises(RolloutError, match="did not arrive"):
            finish(schedule, supply, result.state)


@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_an_algorithm_that_generates_nothing_is_refused(name: str, algorithm: str) -> None:
    make, kwargs = LOOKING_AHEAD[name]
    with pytest.raises(ConfigError, match=f"{algorithm} generates nothing"):
        make(ALGORITHMS[algorithm], LocalTransport(), RoleSet({}), None, **kwargs)


def test_more_ahead_than_may_be_stale_is_refused() -> None:
    for ahead in (0, 3):
        with pytest.raises(ConfigError, match=f"schedule.ahead is {ahead} and schedule.max_staleness is 2"):
            kit.toy(BoundedAsync, max_staleness=2, ahead=ahead)
    assert kit.toy(BoundedAsync, max_staleness=2)[0].ahead == 2
    assert [kit.toy(BoundedAsync, max_staleness=m, partial_tokens=4)[0].ahead for m in (1, 2, 3)] == [1, 1, 2]


def test_partial_rollouts_need_a_role_that_can_continue_them() -> None:
    with pytest.raises(ConfigError, match="cannot continue unfinished responses"):
        kit.toy(BoundedAsync, kit.WholeActor(), max_staleness=1, partial_tokens=4)
    kit.toy(BoundedAsync, kit.WholeActor(), max_staleness=1)


def test_one_step_off_is_recorded_as_the_planner_reads_it() -> None:
    transport = RecordingTransport()
    roles = RoleSet({"actor": transport.handle("actor", kit.ToyActor)})
    OneStepOff(kit.TOY, transport, roles, None).advance(lambda: "prompts", kit.ToyState(0))
    calls = [(n.role, n.method, n.inputs) for n in transport.nodes]
    assert calls == [
        ("actor", "generate", ()),
        ("actor", "generate", ()),
        ("actor", "logprobs", (0,)),
        ("controller", "<lambda>", (0, 2)),
        ("actor", "step", (3,)),
        ("actor", "publish", ()),
        ("controller", "merged_by_role", (3,)),
        ("controller", "staleness_stats", (3, 6)),
    ]


def test_staleness_by_hand() -> None:
    rollout = kit.ToyActor().generate(kit.prompts(0, 1, 3))
    lens = rollout.sequences.response_lens.tolist()
    rollout = replace(rollout, weights_version=torch.tensor([4, 6, 3]))
    stats = staleness_stats(rollout, 6, {"buffered": 5}, {})
    assert stats["schedule/staleness_mean"].mean == pytest.approx((2 * lens[0] + 0 + 3 * lens[2]) / sum(lens))
    assert stats["schedule/staleness_max"].mean == 3
    assert stats["schedule/buffered"].mean == 5


def asked(step: int, order: int) -> list[Asked]:
    prompts = kit.prompts(step)
    return [Asked(prompts.select([place]), order + place, 9) for place in range(len(prompts))]


def call_of(*prompts: Asked) -> Call:
    return Call(tuple(key for one in prompts for key in one.responses()), None)


def test_responses_find_their_prompts_in_whatever_order_they_come() -> None:
    rollout = kit.ToyActor().generate(kit.prompts(0))
    found, left = sorted_out(call_of(*asked(0, 4)), rollout.select(torch.tensor([2, 0, 3, 1])), Carried())
    assert left == []
    assert [(order, rows.prompt_ids, rows.samples.tolist()) for order, rows in found] == [
        (5, ("0.1", "0.1"), [0, 1]),
        (4, ("0.0", "0.0"), [0, 1]),
    ]


def test_one_prompt_on_its_way_for_two_steps_is_told_apart_by_what_is_left() -> None:
    actor, early = kit.ToyActor(), kit.prompts(0)
    late = replace(early, step=7)
    call = call_of(*asked(0, 0), *[Asked(late.select([place]), 10 + place, 9) for place in range(2)])
    rollout = actor.generate(early)
    still = Carried(tuple(samples_of(early))[:1])  # sample 0 of prompt 0.0 of the early step is not done
    every = Rollout.concat([rollout.select(torch.tensor([1, 2, 3])), rollout])
    found, left = sorted_out(call, every, still)
    assert [key for key, _ in left] == [call.keys[0]]
    assert {order: rows.samples.tolist() for order, rows in found} == {0: [1], 1: [0, 1], 10: [0, 1], 11: [0, 1]}


def test_responses_that_are_missing_or_were_not_asked_for_are_refused() -> None:
    rollout, call = kit.ToyActor().generate(kit.prompts(0)), call_of(*asked(0, 0))
    with pytest.raises(RolloutError, match=r"1 of 4 responses did not come back, such as one to 0\.1"):
        sorted_out(call, rollout.select(torch.tensor([0, 1, 2])), Carried())
    with pytest.raises(RolloutError, match=r"a response to prompt 0\.0 came back that was not asked for"):
        sorted_out(call, rollout.select(torch.tensor([0, 1, 2, 3, 0])), Carried())
    with pytest.raises(RolloutError, match=r"a response to prompt 3\.0 came back that was not asked for"):
        sorted_out(call, rollout, Carried(tuple(samples_of(kit.prompts(3)))))


# ---- what a checkpoint holds of a batch


def full_rollout() -> Rollout:
    rollout = kit.ToyActor().generate(kit.prompts(3))
    column = rollout.rollout_logp
    total = torch.arange(4.0)
    return rollout.adding(
        old_logp=column.with_flat(column.flat + 1),
        score=Scores(total[:, None], total, ("model",)),
        truths=((1, (2,)), [1, [2]], {"a": None, 3: "x"}, "text"),
        texts=("", "ü", '{"t": [1]}', "null"),
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Rollout | Prompts | Ragged | Scores) or hasattr(a, "prompt_lens"):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("batch", [full_rollout(), kit.prompts(2)], ids=["rollout", "prompts"])
def test_a_batch_comes_back_from_safetensors_and_json_as_it_was(batch: Any, tmp_path: Path) -> None:
    import json

    tensors, plain = flatten({"batch": packed(batch)})
    save_file(tensors, tmp_path / "x.safetensors")
    back = unpacked(unflatten(load_file(tmp_path / "x.safetensors"), json.loads(json.dumps(plain)))["batch"])
    assert same(batch, back)
    assert not same(batch, kit.prompts(9))


def test_what_cannot_be_kept_is_refused_and_what_is_no_batch_is_not_read() -> None:
    with pytest.raises(CheckpointError, match="column truths"):
        packed(replace(kit.prompts(0), truths=(object(), None)))
    samples = samples_of(replace(kit.prompts(0), truths=((1, [2]), None)))
    assert unpacked_samples(packed_samples(samples)) == samples
    with pytest.raises(CheckpointError, match="a dict cannot be kept"):
        packed({})
    with pytest.raises(CheckpointError, match="'Popen' with the columns args, kind is no saved batch"):
        unpacked({"kind": "Popen", "args": "true"})


# ---- from a recipe


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Synchronous),
        ({"kind": "one_step_off"}, OneStepOff),
        ({"kind": "asynchronous", "max_staleness": 3, "ahead": 2, "partial_tokens": 5}, BoundedAsync),
    ],
)
def test_a_recipe_names_its_schedule(settings: dict[str, Any], expected: type) -> None:
    from tutelage.config import PPOConfig

    cfg = PPOConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "schedule": settings})
    transport = LocalTransport()
    roles = RoleSet({"actor": transport.handle("actor", kit.ToyActor())})
    schedule = make_schedule(ALGORITHMS["ppo"], transport, roles, cfg)
    assert type(schedule) is expected
    if isinstance(schedule, BoundedAsync):
        assert (schedule.max_staleness, schedule.ahead) == (3, 2)
        assert schedule.partial_tokens == 5
