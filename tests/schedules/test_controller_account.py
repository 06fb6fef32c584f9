"""What a run tells of its time and memory: every step, at its end, and over a resume."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import toy_kit as kit
from test_controller_resume import Saving

from tutelage.checkpoints import Checkpoints
from tutelage.controller import Controller
from tutelage.data.sampler import EpochSampler
from tutelage.errors import ClusterError, PreemptedError
from tutelage.reports.display import JsonDisplay, PlainDisplay
from tutelage.reports.metrics_log import MetricsLog, read_events, read_metrics
from tutelage.schedules import Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Rollout

NAP = 0.02
STEPS = 5
EVERY = {"generate", "logprobs", "step", "publish"}


class Sleepy(Saving):
    """Takes its time to step, to save, and to say what a checkpoint takes."""

    def step(self, batch: Rollout, loss: Any) -> dict[str, Any]:
        time.sleep(NAP)
        return super().step(batch, loss)

    def save_state(self, folder: Path) -> None:
        time.sleep(NAP)
        super().save_state(folder)


class Gone:
    """A role whose process answers until the last checkpoint is there, and is lost then."""

    def __init__(self, folder: Path) -> None:
        self.last = folder / "checkpoints" / f"step_{STEPS:06d}"

    def take_measured(self) -> Any:
        if self.last.exists():
            raise ClusterError("rank 0 of pool far was lost", fix="resume")
        return self

    def gather(self) -> list[Any]:
        return []


class Lost:
    """A role whose process answers at the start of the run and never again."""

    def __init__(self) -> None:
        self.asked = 0

    def take_measured(self) -> Any:
        self.asked += 1
        if self.asked > 1:
            raise ClusterError("rank 0 of pool far was lost", fix="resume")
        return self

    def gather(self) -> list[Any]:
        return []


def controller(folder: Path, display: Any = None, **extra: Any) -> Controller:
    transport = LocalTransport()
    roles = RoleSet({"actor": transport.handle("actor", Sleepy()), **extra})
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return Controller(
        folder=folder,
        total_steps=STEPS,
        schedule=Synchronous(kit.TOY, transport, roles, None),
        transport=transport,
        roles=roles,
        learners=("actor",),
        source=EpochSampler(10, 3, 4, seed=0, drop_last=True),
        make_batch=lambda index, step: kit.prompts(step, 3),
        evaluator=None,
        evaluate_every=0,
        checkpoints=Checkpoints(folder / "checkpoints", "actor", 9),
        checkpoint_every=2,
        alarms=None,
        log=MetricsLog(folder),
        display=display or PlainDisplay(STEPS, "toy", stream=io.StringIO()),
        trackers=(),
        state=kit.ToyState(0),
    )


def lines(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["call"]: line for line in summary["resources"]["calls"]}


def test_the_seconds_of_a_step_add_up_and_leave_out_checkpoints(tmp_path: Path) -> None:
    controller(tmp_path).run()
    rows = read_metrics(tmp_path)
    assert len(rows) == STEPS
    for row in rows:
        assert {name for name in row if name.startswith("time/actor/")} == {f"time/actor/{call}" for call in EVERY}
        parts = [row[f"time/actor/{call}"] for call in EVERY]
        assert row["time/other"] > 0
        assert sum(parts) + row["time/other"] == pytest.approx(row["time/step_s"], abs=1e-9)
        assert row["time/actor/step"] >= NAP


def test_the_seconds_of_a_run_add_up(tmp_path: Path) -> None:
    started = time.perf_counter()
    summary = controller(tmp_path).run()
    outside = time.perf_counter() - started
    found = summary["resources"]
    parts = [line["seconds"] for line in found["calls"]]
    assert sum(parts) + found["other_seconds"] == pytest.approx(found["seconds"])
    assert found["other_seconds"] > 0
    assert found["seconds"] <= outside
    assert sum(line["share"] for line in found["calls"]) < 1
    by_call = lines(summary)
    assert set(by_call) == EVERY | {"save_state", "save_pretrained", "checkpoint_bytes"}
    assert {call: by_call[call]["calls"] for call in EVERY} == dict.fromkeys(EVERY, STEPS)
    assert by_call["step"]["seconds"] >= STEPS * NAP
    assert by_call["save_state"]["calls"] == 3  # after steps 2 and 4, and at the end
    assert by_call["save_state"]["seconds"] >= 3 * NAP


def test_a_resumed_run_goes_on_with_the_sums(tmp_path: Path) -> None:
    whole = controller(tmp_path).run()
    again = controller(tmp_path)
    again.restore(tmp_path / "checkpoints" / "step_000004", kit.TOY.state_from)
    resumed = again.run()
    for call in EVERY:
        assert lines(resumed)[call]["calls"] == STEPS
        assert lines(resumed)[call]["tokens"] == lines(whole)[call]["tokens"]
    assert lines(resumed)["generate"]["tokens"] > 0
    assert lines(resumed)["step"]["seconds"] >= STEPS * NAP
    found = resumed["resources"]
    assert sum(line["seconds"] for line in found["calls"]) + found["other_seconds"] == pytest.approx(found["seconds"])
    assert found["other_seconds"] > 0


def test_a_checkpoint_without_sums_does_not_make_its_time_the_controllers(tmp_path: Path) -> None:
    controller(tmp_path).run()
    again = controller(tmp_path)
    load = again.checkpoints.load
    saved: dict[str, Any] = {}

    def without_sums(*given: Any) -> dict[str, Any]:
        saved.update(load(*given))
        return {name: value for name, value in saved.items() if name != "account"}

    again.checkpoints.load = without_sums  # type: ignore[method-assign]
    again.restore(tmp_path / "checkpoints" / "step_000004", kit.TOY.state_from)
    found = again.run()["resources"]
    assert saved["seconds"] > 0
    assert found["uncounted_seconds"] == saved["seconds"]
    counted = sum(line["seconds"] for line in found["calls"]) + found["other_seconds"]
    assert counted + found["uncounted_seconds"] == pytest.approx(found["seconds"])


def test_steps_that_are_taken_again_in_one_process_count_once(tmp_path: Path) -> None:
    """As after a loss: the sums and the clock are those of the checkpoint, what was lost is not in them."""
    running = controller(tmp_path)
    running.begin_account({})
    running.batches = iter(running.source)
    for _ in range(4):
        running.step()
    time.sleep(2 * NAP)
    running.restore(tmp_path / "checkpoints" / "step_000002", kit.TOY.state_from)
    assert running.done == 2
    assert running.account.lines["actor", "step"].calls == 2
    running.batches = iter(running.source)
    running.step()
    found = running.resources()
    by_call = {line["call"]: line for line in found["calls"]}
    assert by_call["step"]["calls"] == 3
    assert found["other_seconds"] is not None
    assert by_call["step"]["seconds"] + found["other_seconds"] <= found["seconds"]


def test_a_rank_that_is_gone_at_the_end_does_not_stop_it(tmp_path: Path) -> None:
    summary = controller(tmp_path, far=Gone(tmp_path)).run()
    assert summary["steps"] == STEPS
    assert lines(summary)["step"]["calls"] == STEPS
    (event,) = [event for event in read_events(tmp_path) if event["kind"] == "measurement"]
    assert "rank 0 of pool far was lost" in event["message"]


def test_a_role_that_is_gone_does_not_keep_a_checkpoint_from_being_written(tmp_path: Path) -> None:
    run = controller(tmp_path, far=Lost())
    run.checkpoint_every = 1
    assert run.run()["steps"] == STEPS
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) == STEPS


def test_a_run_that_leaves_asks_nobody_before_it_writes(tmp_path: Path) -> None:
    far = Lost()
    run = controller(tmp_path, far=far)
    run.leave("told to stop")
    with pytest.raises(PreemptedError):
        run.run()
    assert far.asked == 1
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) == 1


def test_programs_get_the_tables_as_json(tmp_path: Path) -> None:
    stream = io.StringIO()
    summary = controller(tmp_path, JsonDisplay(STEPS, "toy", stream=stream)).run()
    last = json.loads(stream.getvalue().splitlines()[-1])
    assert last["type"] == "summary"
    assert last["summary"]["resources"] == summary["resources"]
    assert json.loads((tmp_path / "summary.json").read_text())["resources"] == summary["resources"]


def test_the_table_is_printed_once_at_the_end(tmp_path: Path) -> None:
    stream = io.StringIO()
    controller(tmp_path, PlainDisplay(STEPS, "toy", stream=stream)).run()
    said = stream.getvalue()
    assert said.count("time and peak memory") == 1
    assert said.index("toy: done in") < said.index("time and peak memory")
    assert "actor" in said.split("time and peak memory")[1]
