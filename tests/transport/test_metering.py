"""What calls take: memory in the phase that takes it and in no other, tokens by hand, sums over ranks and resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import metering_kit as kit
import pytest
import ray_kit
import torch

from tutelage.errors import ClusterError
from tutelage.sharing import Share
from tutelage.transport.account import Account
from tutelage.transport.local import LocalTransport
from tutelage.transport.metering import (
    BETWEEN,
    BUILDING,
    CONTROLLER,
    TAKE,
    Measured,
    Meter,
    Phase,
    ProcessUse,
    tokens_of,
)
from tutelage.transport.residency import (
    ProcessMemory,
    ResetMark,
    RunWideMark,
    SampledMark,
    best_mark,
    process_memory,
    resident,
)
from tutelage.transport.roleset import RoleSet
from tutelage.types import Pairs

NOTHING = ProcessUse("reset", 0, 0, BETWEEN, 0)


def can_reset() -> bool:
    return best_mark().kind == "reset"


needs_reset = pytest.mark.skipif(not can_reset(), reason="this system does not let VmHWM be set back")


@pytest.fixture
def local() -> tuple[LocalTransport, RoleSet]:
    transport = LocalTransport()
    handles, _ = transport.start(kit.hungry, ("actor", "critic"))
    roles = RoleSet(handles)
    Account().measure(roles)
    return transport, roles


def phases(role: object) -> dict[str, Phase]:
    (told,) = role.take_measured().gather()
    return dict(told.phases)


# ---- marks ----


@needs_reset
def test_a_mark_that_is_set_back_shows_what_was_taken_since() -> None:
    mark = ResetMark()
    before = resident()
    held = kit.filled()
    assert mark.take() >= before + kit.SIZE - kit.SLACK
    del held
    assert mark.take() >= before + kit.SIZE - kit.SLACK  # it was still there when the mark was set
    assert mark.take() < before + kit.SIZE / 2


def test_making_a_mark_leaves_what_others_read(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t    1234 kB\n")
    (tmp_path / "clear_refs").write_text("")
    mark = ResetMark(tmp_path)
    assert (tmp_path / "clear_refs").read_text() == ""
    assert mark.take() == 1234 * 1024
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_a_mark_that_can_be_opened_and_not_set_gives_way_to_samples() -> None:
    class Forbidden:
        kind = "reset"

        def take(self) -> int:
            raise PermissionError("clear_refs")

    memory = ProcessMemory(Forbidden())
    assert memory.take() > 0
    assert memory.mark.kind != "reset"
    assert memory.peak() >= memory.most > 0


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="no /proc on this system")
def test_a_thread_samples_the_size_where_no_mark_can_be_set() -> None:
    mark = SampledMark()
    before = mark.take()
    held = kit.filled()
    deadline = time.monotonic() + 30
    while mark._most < before + kit.SIZE - kit.SLACK and time.monotonic() < deadline:
        time.sleep(0.01)
    del held
    assert mark.take() >= before + kit.SIZE - kit.SLACK
    assert mark.take() < before + kit.SIZE / 2


def test_where_nothing_else_works_the_mark_is_that_of_the_whole_run() -> None:
    mark = RunWideMark()
    ResetMark().take() if can_reset() else None
    before = mark.take()
    kit.filled()
    assert mark.take() >= max(before, kit.SIZE)
    assert mark.take() >= kit.SIZE, "a question does not set it back"


def test_the_best_mark_is_the_first_that_the_system_allows(tmp_path: Path) -> None:
    assert best_mark(tmp_path).kind == "run-wide"
    (tmp_path / "statm").write_text("900 50 3 0 0 0 0\n")
    sampled = best_mark(tmp_path)
    assert sampled.kind == "sampled"
    assert sampled.take() == resident(str(tmp_path / "statm"))
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t    1234 kB\nVmRSS:\t 7 kB\n")
    assert best_mark(tmp_path).kind == "sampled"  # it can be read, not set back
    (tmp_path / "clear_refs").write_text("")
    assert best_mark(tmp_path).kind == "reset"
    assert ResetMark(tmp_path).take() == 1234 * 1024
    assert (tmp_path / "clear_refs").read_text() == "5"


class Scripted:
    """A mark that says what it is told, in MB."""

    kind = "reset"

    def __init__(self, *peaks: int) -> None:
        self.peaks = [peak * 10**6 for peak in peaks]

    def take(self) -> int:
        return self.peaks.pop(0)


def test_the_peak_of_a_process_says_what_ran() -> None:
    meter = Meter(process=ProcessMemory(Scripted(10, 11, 40, 12, 30, 13)), before=9 * 10**6)
    first = meter.take("actor", {"actor": object()})
    assert first.process == ProcessUse("reset", 9 * 10**6, 10 * 10**6, BUILDING, 0)
    for name in ("step", "generate"):
        with meter.phase("actor", name):
            pass
    told = meter.take("actor", {"actor": object()})
    assert {name: phase.peak for name, phase in told.phases.items()} == {"step": 40 * 10**6, "generate": 30 * 10**6}
    assert told.process == ProcessUse("reset", 9 * 10**6, 40 * 10**6, "actor.step", 13 * 10**6)


def test_a_call_inside_a_call_counts_for_both() -> None:
    meter = Meter(process=ProcessMemory(Scripted(1, 1, 50, 70, 20, 5)))
    meter.take("a", {"a": object()})
    with meter.phase("a", "outer"), meter.phase("a", "inner"):
        pass
    told = meter.take("a", {"a": object()})
    assert {name: phase.peak // 10**6 for name, phase in told.phases.items()} == {"inner": 70, "outer": 70}


def test_nothing_is_marked_before_the_first_question() -> None:
    meter = Meter(process=ProcessMemory(Scripted(1, 2)))
    with meter.phase("a", "call") as running:
        running.saw((ray_kit.generated(ray_kit.prompts_of(3)),))
    assert dict(meter.take("a", {"a": object()}).phases) == {}
    assert meter.asked


@needs_reset
def test_the_largest_size_of_the_process_outlasts_marks_that_are_set_back() -> None:
    memory = process_memory()
    before = resident()
    memory.take()
    kit.filled()
    memory.take()
    memory.take()
    assert memory.peak() >= before + kit.SIZE - kit.SLACK
    assert process_memory() is memory


# ---- the local transport ----


@needs_reset
def test_memory_shows_in_the_call_that_took_it_and_not_in_the_next(local: tuple[LocalTransport, RoleSet]) -> None:
    _, roles = local
    before = resident()
    roles.actor.eat().gather()
    roles.critic.fast().gather()
    roles.actor.fast().gather()
    eaten, after, other = phases(roles.actor), phases(roles.critic), resident()
    assert eaten["eat"].peak >= before + kit.SIZE - kit.SLACK
    assert eaten["fast"].peak <= eaten["eat"].peak - kit.SIZE + 2 * kit.SLACK
    assert after["fast"].peak <= eaten["eat"].peak - kit.SIZE + 2 * kit.SLACK
    assert other < before + kit.SIZE / 2


def test_calls_are_counted_once_even_where_they_fail(local: tuple[LocalTransport, RoleSet]) -> None:
    _, roles = local
    for _ in range(3):
        roles.actor.fast().gather()
    with pytest.raises(KeyError):
        roles.actor.choke()
    assert {name: phase.calls for name, phase in phases(roles.actor).items()} == {"fast": 3, "choke": 1}
    assert phases(roles.actor) == {}, "a question begins anew"


def test_questions_cost_the_run_no_seconds(local: tuple[LocalTransport, RoleSet]) -> None:
    transport, roles = local
    transport.take_seconds()
    phases(roles.actor)
    assert transport.take_seconds() == {}


def test_tokens_are_those_of_the_batch_of_a_call(local: tuple[LocalTransport, RoleSet]) -> None:
    _, roles = local
    rollout = ray_kit.generated(ray_kit.prompts_of(5))
    # prompts of 1, 4, 2, 5, 3 tokens, twice each; responses of 1 + (7 p + 3 s) % 6 tokens
    prompts = 2 * (1 + 4 + 2 + 5 + 3)
    responses = sum(1 + (7 * p + 3 * s) % 6 for p in range(5) for s in range(2))
    roles.actor.lengths(rollout).gather()
    roles.actor.lengths(rollout).gather()
    assert phases(roles.actor)["lengths"].tokens == 2 * (prompts + responses)


def test_tokens_of_pairs_are_of_both_sides_and_a_filler_has_none() -> None:
    chosen = ray_kit.generated(ray_kit.prompts_of(2)).sequences
    pairs = Pairs(chosen, chosen, torch.zeros(4), tuple("abcd"))
    assert tokens_of(pairs) == 2 * tokens_of(chosen) == 2 * int(chosen.tokens.lens.sum())
    assert tokens_of(Share(pairs, torch.tensor([-1]), None, pairs)) == 0
    assert tokens_of(Share(pairs, torch.arange(4), None, pairs)) == tokens_of(pairs)
    assert tokens_of({"no": "rows"}) == 0


# ---- the account of a run ----


def told(label: str, held: int = 0, **phases: Phase) -> Measured:
    from tutelage.engines.held import Held

    return Measured(label, phases, Held(weights=held), NOTHING)


def test_ranks_are_joined_by_the_largest_peak_and_tokens_are_summed() -> None:
    account = Account()
    account.add("actor", [told("main 0", 5, step=Phase(2, 10.5, 100)), told("main 1", 7, step=Phase(2, 4.5, 300))])
    account.add("actor", [told("main 0", 5, step=Phase(1, 1.0, 200)), told("main 1", 7)])
    account.spend({("actor", "step"): 2.0, ("actor", TAKE): 9.0, (CONTROLLER, "advantages"): 1.0})
    account.spend({("actor", "step"): 1.0})
    found = account.summary(10.0)
    assert found["calls"] == [
        {
            "role": "actor",
            "call": "step",
            "calls": 3,
            "seconds": 3.0,
            "share": 0.3,
            "tokens": 16,
            "peak_bytes": 300,
            "where": "main 1",
        }
    ]
    assert found["other_seconds"] == 7.0
    assert found["held"]["actor"]["weights"] == 7
    assert set(found["processes"]) == {"main 0", "main 1"}


def test_calls_that_overlap_leave_no_rest() -> None:
    account = Account()
    account.spend({("actor", "generate"): 6.0, ("reference", "logprobs"): 5.0})
    found = account.summary(10.0)
    assert found["other_seconds"] is None
    assert [line["share"] for line in found["calls"]] == [0.6, 0.5]


def test_an_account_goes_on_from_its_state_as_a_file_holds_it() -> None:
    account, whole = Account(), Account()
    for one in (account, whole):
        one.add("actor", [told("main 0", 3, step=Phase(2, 8.0, 100))])
        one.spend({("actor", "step"): 1.5})
    resumed = Account()
    resumed.load_state(json.loads(json.dumps(account.state())))
    for one in (resumed, whole):
        one.add("actor", [told("main 0", 3, step=Phase(1, 4.0, 50))])
        one.spend({("actor", "step"): 0.5})
    assert resumed.summary(4.0) == whole.summary(4.0)
    assert resumed.summary(4.0)["calls"][0]["calls"] == 3
    resumed.load_state({})
    assert resumed.summary(4.0)["calls"] == []


def test_a_rank_that_is_gone_is_told_of_and_the_others_are_asked() -> None:
    class Gone:
        def take_measured(self) -> None:
            raise ClusterError("rank 1 of pool main was lost", fix="resume")

    transport = LocalTransport()
    roles = RoleSet({"actor": Gone(), "critic": transport.handle("critic", kit.Hungry())})
    account, lost = Account(), []
    with pytest.raises(ClusterError):
        account.measure(roles)
    account.measure(RoleSet({"critic": roles.critic}))
    roles.critic.fast().gather()
    account.measure(roles, lambda role, error: lost.append((role, error.what)))
    assert lost == [("actor", "rank 1 of pool main was lost")]
    assert account.lines["critic", "fast"].calls == 1


# ---- Ray ----


@pytest.fixture(scope="module")
def on_ray() -> Callable[[], RoleSet]:
    """Two ranks in one pool, two roles."""
    pytest.importorskip("ray")
    from tutelage.transport.ray import ray_transport

    ray_kit.shared_ray()
    split = {"actor": {"shard": 2}, "critic": {"tensor": 2}}
    running = ray_transport(ray_kit.cluster(pools={"main": 2}, layout=split))
    handles, _ = running.start(kit.hungry, ("actor", "critic"))
    yield RoleSet(handles)
    running.close()


def test_every_rank_tells_what_its_calls_took(on_ray: RoleSet) -> None:
    account = Account()
    account.measure(on_ray)
    account.lines.clear()
    on_ray.actor.fast().gather()
    on_ray.actor.eat().gather()
    on_ray.critic.eat(1000).gather()
    ranks = on_ray.actor.take_measured().gather()
    assert [one.label for one in ranks] == ["main 0", "main 1"]
    assert [set(one.phases) for one in ranks] == [{"fast", "eat"}] * 2
    account.add("actor", ranks)
    account.measure(RoleSet({"critic": on_ray.critic}))
    assert account.lines["critic", "eat"].calls == 1
    assert set(account.processes) == {"main 0", "main 1"}
    if ranks[1].process.kind == "reset":
        assert account.lines["actor", "eat"].where == "main 1", "rank 1 alone took memory"
        grown = [one.phases["eat"].peak - one.phases["fast"].peak for one in ranks]
        assert grown[0] < kit.SIZE / 2 < kit.SIZE - kit.SLACK < grown[1]


def test_tokens_over_ranks_are_those_of_the_batch(on_ray: RoleSet) -> None:
    """Data ranks work on different rows; tensor peers on the same ones."""
    account = Account()
    account.measure(on_ray)
    account.lines.clear()
    rollout = ray_kit.generated(ray_kit.prompts_of(5))
    on_ray.actor.lengths(rollout).gather()
    on_ray.critic.lengths(rollout).gather()
    account.measure(on_ray)
    assert account.lines["actor", "lengths"].tokens == tokens_of(rollout)
    assert account.lines["critic", "lengths"].tokens == tokens_of(rollout)
    one = ray_kit.generated(ray_kit.prompts_of(1, n=1))
    on_ray.actor.lengths(one).gather()
    account.lines.clear()
    account.measure(on_ray)
    assert account.lines["actor", "lengths"].tokens == tokens_of(one), "the rank without rows counts none"
