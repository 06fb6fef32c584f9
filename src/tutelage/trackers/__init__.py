"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases. Both optional; imported when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutelage.errors import ConfigError, closest
from tutelage.trackers.tensorboard import TensorBoardTracker
from tutelage.trackers.wandb import WandbMode, WandbTracker

if TYPE_CHECKING:
    from tutelage.protocols import Tracker

TRACKERS: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}


def make_trackers(
    names: Sequence[str],
    run_folder: Path | str,
    run_name: str,
    config: Mapping[str, Any],
    *,
    first_step: int = 0,
    wandb_mode: WandbMode | None = None,
) -> list[Tracker]:
    """One tracker a name.

    first_step: the step a resumed run takes first; what a tracker knows of it and later ones is replaced.
    wandb_mode: online, offline or disabled; None leaves it to wandb's own settings.

    Raises ConfigError for an unknown name or a tracker that does not start, MissingExtraError for one that is not
    installed; trackers already started are closed.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ConfigError(
            f"no tracker is called {unknown[0]!r}.{closest(unknown[0], TRACKERS)}", fix=f"use {' or '.join(TRACKERS)}"
        )
    started: list[Tracker] = []
    try:
        for name in names:
            options = {"mode": wandb_mode} if name == "wandb" else {}
            started.append(TRACKERS[name](Path(run_folder), run_name, config, first_step=first_step, **options))
    except BaseException:
        for tracker in started:
            tracker.close()
        raise
    return started
