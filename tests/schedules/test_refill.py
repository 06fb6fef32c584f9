"""Dynamic sampling: what a step draws, keeps and drops, what it says, and that a stopped run goes on exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_kit as kit

from tutelage.checkpoints import Checkpoints
from tutelage.controller import Controller
from tutelage.data.sampler import EpochSampler
from tutelage.errors import ConfigError
from tutelage.reports.display import make_display
from tutelage.reports.metrics_log import MetricsLog, read_events, read_metrics
from tutelage.schedules import Synchronous, make_schedule
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Prompts, Rollout, Stat


class Grouped(kit.ToyActor):
    """Numbers the groups of a batch, as rollout engines do; saves w."""

    def generate(self, asked: Prompts) -> Rollout:
        return super().generate(asked).adding(group=torch.arange(len(asked)).repeat_interleave(asked.n))

    def save_state(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "w.json").write_text(json.dumps(self.w))

    def load_state(self, folder: Any) -> None:
        self.w = json.loads((folder / "w.json").read_text())

    def checkpoint_bytes(self) -> int:
        return 100


def algorithm(says: Callable[[Rollout], torch.Tensor], limit: int, fewest: int = 1) -> Any:
    """The toy algorithm, in which `says` tells the rows that are worth learning from."""
    return SimpleNamespace(
        **vars(kit.TOY),
        refills=lambda cfg: limit,
        informative=lambda batch, cfg: says(batch),
        generated_stats=lambda batch, cfg: {"reward/generated": Stat(float(len(batch)), 1)},
        fewest_rows=lambda cfg: fewest,
    )


def named(*silent: str) -> Callable[[Rollout], torch.Tensor]:
    """Every prompt says something but these."""
    return lambda batch: torch.tensor([name not in silent for name in batch.prompt_ids])


def by_tokens(batch: Rollout) -> torch.Tensor:
    """Depends on the tokens, hence on everything that was learned before; a little under half of the groups."""
    rows = batch.sequences.response_rows()
    sums = [sum(sum(row) for row, own in zip(rows, batch.group.tolist(), strict=True) if own == g) for g in range(3)]
    return torch.tensor([sums[int(g)] % 5 < 2 for g in batch.group])


def schedule(says: Any, limit: int = 4, fewest: int = 1) -> tuple[Synchronous, Grouped]:
    actor, transport = Grouped(), LocalTransport()
    roles = RoleSet({"actor": transport.handle("actor", actor)})
    return Synchronous(algorithm(says, limit, fewest), transport, roles, None), actor


def ids(result: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(result.batch.prompt_ids))


def metric(result: Any, name: str) -> float:
    return result.stats[name].mean


def test_a_step_draws_until_it_has_as_many_informative_groups_as_a_batch_has_prompts() -> None:
    made, actor = schedule(named("0.0", "0.2", "1.1"))
    result = made.advance(kit.Supply(9, count=3), kit.ToyState(0))
    assert result is not None
    assert ids(result) == ("0.1", "1.0", "1.2"), "the first ones, in the order of their prompts"
    assert result.batch.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert result.batch.samples.tolist() == [0, 1] * 3
    assert [what for what, _ in actor.log] == ["generate", "logprobs", "generate", "logprobs", "step", "publish"]
    assert metric(result, "schedule/refills") == 1
    assert metric(result, "schedule/groups_generated") == 6
    assert metric(result, "schedule/groups_informative_fraction") == pytest.approx(3 / 6)
    assert metric(result, "schedule/groups_surplus") == 0
    assert result.stats["reward/generated"] == Stat(12.0, 2), "of everything that was generated"
    assert result.notes == ()


def test_groups_beyond_a_step_are_dropped_and_counted_and_the_next_step_draws_its_own() -> None:
    made, _ = schedule(named("0.0"))
    supply, state = kit.Supply(9, count=3), kit.ToyState(0)
    (first, second), _ = kit.run(made, supply, 2, state)
    assert ids(first) == ("0.1", "0.2", "1.0")
    assert metric(first, "schedule/groups_surplus") == 2
    assert ids(second) == kit.prompts(2, 3).ids
    assert metric(second, "schedule/refills") == 0
    assert second.batch.weights_version.tolist() == [1] * 6, "every rollout is of the newest weights"
    assert made.state() == {}, "a checkpoint holds no rollouts"


def test_after_its_refills_a_step_goes_on_with_what_it_has_and_says_so() -> None:
    made, _ = schedule(named(*(f"{s}.{i}" for s in range(9) for i in range(3) if (s, i) != (1, 1))), limit=2)
    supply = kit.Supply(9, count=3)
    result = made.advance(supply, kit.ToyState(0))
    assert result is not None
    assert ids(result) == ("1.1",)
    assert supply.taken == 3, "its own batch and two refills"
    assert result.notes == ("1 of 3 groups of this step have scores that differ: 2 refills were used",)


def test_at_the_end_of_the_data_a_step_goes_on_with_what_it_has_and_the_next_has_nothing() -> None:
    made, _ = schedule(named("0.0", "0.1"), limit=7)
    supply = kit.Supply(1, count=3)
    result = made.advance(supply, kit.ToyState(0))
    assert result is not None
    assert ids(result) == ("0.2",)
    assert result.notes == ("1 of 3 groups of this step have scores that differ: the data has no prompts left",)
    assert made.advance(supply, kit.ToyState(1)) is None


@pytest.mark.parametrize(("fewest", "expected"), [(1, ("0.0",)), (3, ("0.0", "0.1")), (5, ("0.0", "0.1", "0.2"))])
def test_where_no_group_says_anything_some_fill_the_mini_batches(fewest: int, expected: tuple[str, ...]) -> None:
    made, _ = schedule(lambda batch: torch.zeros(len(batch), dtype=torch.bool), limit=1, fewest=fewest)
    result = made.advance(kit.Supply(9, count=3), kit.ToyState(0))
    assert result is not None
    assert ids(result) == expected
    assert result.notes == ("0 of 3 groups of this step have scores that differ: 1 refills were used",)


def test_informative_groups_come_first_where_others_fill_up() -> None:
    made, _ = schedule(named("0.0", "0.1", "1.0", "1.1", "1.2"), limit=1, fewest=4)
    result = made.advance(kit.Supply(9, count=3), kit.ToyState(0))
    assert result is not None
    assert ids(result) == ("0.2", "0.0")


def test_a_recorded_step_is_expected_to_take_one_generation() -> None:
    transport = RecordingTransport()
    roles = RoleSet({"actor": transport.handle("actor", Grouped)})
    made = Synchronous(algorithm(named(), 3), transport, roles, None)
    made.advance(lambda: kit.prompts(0), kit.ToyState(0))
    assert [(n.role, n.method) for n in transport.nodes] == [
        ("actor", "generate"),
        ("actor", "logprobs"),
        ("controller", "sift"),
        ("controller", "<lambda>"),
        ("actor", "step"),
        ("actor", "publish"),
        ("controller", "merged_by_role"),
    ]


@pytest.mark.parametrize("kind", ["one_step_off", "asynchronous"])
def test_schedules_that_begin_ahead_are_refused(kind: str) -> None:
    cfg = SimpleNamespace(schedule=SimpleNamespace(kind=kind))
    with pytest.raises(ConfigError, match=f"schedule.kind is {kind}, but whether a step needs further prompts"):
        make_schedule(algorithm(named(), 3), LocalTransport(), RoleSet({}), cfg)


# ---- with the controller


def controller(folder: Path, says: Any = by_tokens, steps: int = 6, epochs: int = 9) -> tuple[Controller, list[Any]]:
    """Steps of three of ten prompts, a checkpoint after each; the batches drawn, in order."""
    rows: list[Any] = []
    made, _ = schedule(says)

    def batch(index: torch.Tensor, step: int) -> Any:
        rows.append((step, index.tolist()))
        return kit.prompts(step, 3)

    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    transport = made.training.transport
    return Controller(
        folder=folder,
        total_steps=steps,
        schedule=made,
        transport=transport,
        roles=made.training.roles,
        learners=("actor",),
        source=EpochSampler(10, 3, epochs, seed=0, drop_last=True),
        make_batch=batch,
        evaluator=None,
        evaluate_every=0,
        checkpoints=Checkpoints(folder / "checkpoints", "actor", 9),
        checkpoint_every=1,
        alarms=None,
        log=MetricsLog(folder),
        display=make_display("plain", steps, "toy"),
        trackers=(),
        state=kit.ToyState(0),
    ), rows


def lasting(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(("time", "memory"))} for row in read_metrics(folder)]


def told(folder: Path) -> list[str]:
    return [event["message"] for event in read_events(folder) if event["kind"] == "refill"]


def test_a_run_draws_past_one_batch_a_step_and_each_batch_of_the_data_once(tmp_path: Path) -> None:
    running, rows = controller(tmp_path / "run")
    assert running.run()["steps"] == 6
    source = EpochSampler(10, 3, 9, seed=0, drop_last=True)
    assert len(rows) > 6
    assert rows == [(step, index.tolist()) for step, index in zip(range(len(rows)), source, strict=False)]
    refills = [row["schedule/refills"] for row in lasting(tmp_path / "run")]
    assert sum(refills) + 6 == len(rows)
    assert max(refills) > 0


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_resumed_run_repeats_the_rest_bit_for_bit(step: int, tmp_path: Path) -> None:
    whole, drawn = controller(tmp_path / "run")
    whole.run()
    expected = lasting(tmp_path / "run")
    again, rows = controller(tmp_path / "run")
    again.restore(tmp_path / "run" / "checkpoints" / f"step_{step:06d}", kit.TOY.state_from)
    assert again.run()["steps"] == 6
    assert lasting(tmp_path / "run") == expected
    before = sum(int(row["schedule/refills"]) + 1 for row in expected[:step])
    assert rows == drawn[before:], "what was drawn and dropped is not drawn again"


def test_a_run_ends_with_its_data_and_says_so(tmp_path: Path) -> None:
    running, rows = controller(tmp_path / "run", lambda batch: batch.group == 0, epochs=2)
    assert running.run()["steps"] == 2
    assert len(rows) == 6, "two passes of three batches, and not one more"
    assert told(tmp_path / "run") == ["the data has no prompts left after step 2 of 6"]


def test_a_step_without_enough_groups_is_an_event_of_the_run(tmp_path: Path) -> None:
    running, _ = controller(tmp_path / "run", lambda batch: batch.group < 0, steps=1)
    running.run()
    assert told(tmp_path / "run") == ["0 of 3 groups of this step have scores that differ: 4 refills were used"]
