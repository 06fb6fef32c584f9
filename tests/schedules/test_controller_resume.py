"""The controller with a schedule that looks ahead: what it draws, and that a stopped run goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_kit as kit

from tutelage.checkpoints import Checkpoints
from tutelage.controller import Controller
from tutelage.data.sampler import EpochSampler
from tutelage.reports.display import make_display
from tutelage.reports.metrics_log import MetricsLog, read_metrics
from tutelage.schedules import BoundedAsync, OneStepOff, Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet

SCHEDULES = {
    "synchronous": (Synchronous, {}),
    "one step off": (OneStepOff, {}),
    "asynchronous": (BoundedAsync, {"max_staleness": 2}),
    "partial": (BoundedAsync, {"max_staleness": 3, "partial_tokens": 20}),
}


class Saving(kit.ToyActor):
    def save_state(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "w.json").write_text(json.dumps(self.w))

    def load_state(self, folder: Any) -> None:
        self.w = json.loads((folder / "w.json").read_text())

    def checkpoint_bytes(self) -> int:
        return 100


def controller(name: str, folder: Path) -> tuple[Controller, list[torch.Tensor]]:
    """Nine steps of three of ten prompts, a checkpoint after every second one; the rows drawn, in order."""
    make, kwargs = SCHEDULES[name]
    transport, rows = LocalTransport(), []
    roles = RoleSet({"actor": transport.handle("actor", Saving())})

    def batch(index: torch.Tensor, step: int) -> Any:
        rows.append((step, index.tolist()))
        return kit.prompts(step, 3)

    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    made = Controller(
        folder=folder,
        total_steps=9,
        schedule=make(kit.TOY, transport, roles, None, **kwargs),
        transport=transport,
        roles=roles,
        learners=("actor",),
        source=EpochSampler(10, 3, 4, seed=0, drop_last=True),
        make_batch=batch,
        evaluator=None,
        evaluate_every=0,
        checkpoints=Checkpoints(folder / "checkpoints", "actor", 9),
        checkpoint_every=2,
        alarms=None,
        log=MetricsLog(folder),
        display=make_display("plain", 9, "toy"),
        trackers=(),
        state=kit.ToyState(0),
    )
    return made, rows


def lasting(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(("time", "memory"))} for row in read_metrics(folder)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_draws_each_batch_once_and_none_past_its_end(name: str, tmp_path: Path) -> None:
    running, rows = controller(name, tmp_path / "run")
    assert running.run()["steps"] == 9
    source = EpochSampler(10, 3, 4, seed=0, drop_last=True)
    assert rows == [(step, index.tolist()) for step, index in zip(range(9), source, strict=False)]
    assert [row["step"] for row in lasting(tmp_path / "run")] == list(range(1, 10))
    assert all("time/sync_s" in row for row in read_metrics(tmp_path / "run"))


@pytest.mark.parametrize("step", [2, 6, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_repeats_the_rest_exactly(name: str, step: int, tmp_path: Path) -> None:
    whole, _ = controller(name, tmp_path / "run")
    whole.run()
    expected = lasting(tmp_path / "run")
    again, rows = controller(name, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
    assert (path / "schedule").is_dir() == (name != "synchronous")
    again.restore(path, kit.TOY.state_from)
    drawn = again.drawn
    assert again.run()["steps"] == 9
    assert lasting(tmp_path / "run") == expected
    assert [number for number, _ in rows] == list(range(drawn, 9)), "what was begun ahead is not drawn again"
    assert (drawn > step) == (name != "synchronous" and step < 9)
