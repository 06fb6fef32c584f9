from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tutelage.errors import ConfigError, MissingExtraError
from tutelage.trackers import make_trackers
from tutelage.trackers.wandb import RUN_ID, WandbTracker

CONFIG = {"algorithm": "ppo", "kl": {"coef": 0.05}}


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_tensorboard_holds_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tracker,) = make_trackers(["tensorboard"], tmp_path, "run", CONFIG)
    for step in (1, 2, 3):
        tracker.log(step, {"kl/sequence": 0.5 * step})
    tracker.close()
    assert scalars(tmp_path, "kl/sequence") == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_tensorboard_replaces_the_steps_a_resumed_run_takes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tracker,) = make_trackers(["tensorboard"], tmp_path, "run", CONFIG)
    for step in (1, 2, 3):
        tracker.log(step, {"a": float(step)})
    tracker.close()
    (tracker,) = make_trackers(["tensorboard"], tmp_path, "run", CONFIG, first_step=2)
    tracker.log(2, {"a": 20.0})
    tracker.close()
    assert scalars(tmp_path, "a") == [(1, 1.0), (2, 20.0)]


class FakeRun:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.id = settings.get("id", "abc123")
        self.logged: list[dict[str, float]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in with the four calls we make of wandb; what it was told is read back from the tracker's run."""
    module = types.ModuleType("wandb")
    module.init = FakeRun  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.usefixtures("fake_wandb")
def test_wandb_gets_config_name_mode_and_a_step_axis(tmp_path: Path) -> None:
    (tracker,) = make_trackers(["wandb"], tmp_path, "my run", CONFIG, wandb_mode="offline")
    assert isinstance(tracker, WandbTracker)
    tracker.log(4, {"kl/sequence": 1.0})
    tracker.close()
    run = tracker.run
    assert run.settings["mode"] == "offline"
    assert run.settings["name"] == "my run"
    assert run.settings["config"] == CONFIG
    assert run.settings["dir"] == str(tmp_path)
    assert ("*", "step") in run.metrics
    assert run.logged == [{"step": 4, "kl/sequence": 1.0}]
    assert run.finished


@pytest.mark.usefixtures("fake_wandb")
def test_wandb_mode_is_left_to_wandb_unless_given(tmp_path: Path) -> None:
    tracker = WandbTracker(tmp_path, "r", CONFIG)
    assert "mode" not in tracker.run.settings


@pytest.mark.usefixtures("fake_wandb")
def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path) -> None:
    WandbTracker(tmp_path, "r", CONFIG)
    (tmp_path / RUN_ID).write_text("kept42\n")
    resumed = WandbTracker(tmp_path, "r", CONFIG, first_step=3)
    assert resumed.run.settings["id"] == "kept42"
    assert resumed.run.settings["resume"] == "allow"
    assert "id" not in WandbTracker(tmp_path, "r", CONFIG).run.settings


def test_wandb_that_does_not_start_says_what_to_do(tmp_path: Path, fake_wandb: types.ModuleType) -> None:
    def refuse(**settings: Any) -> None:
        raise RuntimeError("api_key not configured")

    fake_wandb.init = refuse  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="api_key not configured") as caught:
        WandbTracker(tmp_path, "r", CONFIG)
    assert "WANDB_MODE=offline" in caught.value.fix


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_extra_names_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as caught:
        make_trackers([name], tmp_path, "r", CONFIG)
    assert f"pip install 'tutelage[{name}]'" in caught.value.fix
    assert isinstance(caught.value, ImportError)


def test_an_unknown_tracker_names_the_closest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean wandb"):
        make_trackers(["wandbb"], tmp_path, "r", CONFIG)


def test_a_tracker_that_fails_to_start_closes_the_ones_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_wandb: types.ModuleType
) -> None:
    started: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        started.append(FakeRun(**settings))
        return started[-1]

    fake_wandb.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError):
        make_trackers(["wandb", "tensorboard"], tmp_path, "r", CONFIG)
    assert [run.finished for run in started] == [True]


def test_no_trackers(tmp_path: Path) -> None:
    assert make_trackers([], tmp_path, "r", CONFIG) == []
