"""What a run writes down when it goes on after a loss, and what it says where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tutelage.controller import Controller
from tutelage.data.sampler import EpochSampler
from tutelage.errors import ClusterError
from tutelage.reports.display import make_display
from tutelage.reports.metrics_log import MetricsLog, read_events, read_metrics
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet

SAVED = {"done": 2, "stopped": "", "seconds": 1.0, "algorithm": {}, "source": {}, "evaluations": {}}


class Kept:
    """A checkpoint of step 2."""

    def latest(self) -> Path:
        return Path("step_000002")

    def load(self, path: Path, roles: Any) -> dict[str, Any]:
        return {**SAVED, "source": EpochSampler(10, 2, 4, seed=0, drop_last=True).state()}


def lost(draw: Any, state: Any) -> None:
    error = ClusterError("rank 1 of pool main on there was lost", fix="resume")
    error.pool = "main"
    raise error


def in_step_4(folder: Path, rebuild: Callable[[ClusterError], str], restarts: int) -> Controller:
    """A run whose fourth step loses a rank."""
    log = MetricsLog(folder)
    for step in (1, 2, 3):
        log.log(step, {"loss": float(step)})
    algorithm = SimpleNamespace(state_from=lambda saved: "restored", PUBLISHED=())
    return Controller(
        folder=folder,
        total_steps=9,
        schedule=SimpleNamespace(advance=lost, algorithm=algorithm, LOOKS_AHEAD=False),  # type: ignore[arg-type]
        transport=LocalTransport(),
        roles=RoleSet({}),
        learners=(),
        source=EpochSampler(10, 2, 4, seed=0, drop_last=True),
        make_batch=lambda index, step: index,
        evaluator=None,
        evaluate_every=0,
        checkpoints=Kept(),  # type: ignore[arg-type]
        checkpoint_every=2,
        alarms=None,
        log=log,
        display=make_display("plain", 9, "toy"),
        trackers=(),
        rebuild=rebuild,
        restarts=restarts,
        done=3,
    )


def test_a_restart_is_in_the_events_with_where_the_group_is_and_later_steps_are_not(tmp_path: Path) -> None:
    running = in_step_4(tmp_path, lambda error: "pool main: ranks 0, 1 on here", 1)
    assert running.step_or_recover()
    assert (running.done, running.state, running.restarts) == (2, "restored", 0)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    (event,) = [e for e in read_events(tmp_path) if e["kind"] == "restart"]
    assert event["step"] == 2
    assert event["message"] == (
        "rank 1 of pool main on there was lost; pool main starts again, the run goes on from step_000002; "
        "pool main: ranks 0, 1 on here"
    )


def test_why_a_run_had_stopped_outlasts_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    running = in_step_4(tmp_path, lambda error: "", 0)
    running.log.event(1, "error", "an old one")
    running.log.event(3, "error", "rank 1 was lost")
    running.restore(Path("step_000002"), lambda saved: None)
    running.restore(Path("step_000002"), lambda saved: None)
    told = [(event["step"], event["message"]) for event in read_events(tmp_path) if event["kind"] == "error"]
    assert told == [(1, "an old one"), (2, "rank 1 was lost")]


def test_the_next_loss_ends_a_run_that_may_start_again_once(tmp_path: Path) -> None:
    running = in_step_4(tmp_path, lambda error: "", 1)
    running.step_or_recover()
    with pytest.raises(ClusterError, match="was lost"):
        running.step_or_recover()


def test_where_there_is_no_room_the_error_says_what_was_lost_before(tmp_path: Path) -> None:
    def full(error: ClusterError) -> str:
        raise ClusterError("pool main asks for 2 x (CPU 1)", fix="add nodes")

    with pytest.raises(ClusterError, match="pool main asks for") as error:
        in_step_4(tmp_path, full, 1).step_or_recover()
    assert error.value.__notes__ == [
        "while pool main was started again after this: rank 1 of pool main on there was lost"
    ]
