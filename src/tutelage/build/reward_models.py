"""What can be said of the reward models of a recipe before a weight is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tutelage.config import GeneratingConfig
from tutelage.errors import ConfigError, ModelError
from tutelage.models.heads import saved_head
from tutelage.models.paths import is_local, read_json

STEPS_FILE = "tutelage_steps.json"
"""Beside a process reward model: {"separator", "loss"}."""


def require_reward_models(cfg: GeneratingConfig) -> None:
    """Every reward model, alone or in an ensemble: its head, and the file that says what a score of its steps is.

    Raises ModelError for a folder without a head, with the head of a critic, or whose file of steps is broken;
    ConfigError for reward.steps with a model that has no such file.  A hub name is left to the loading, but for steps.
    """
    named = {} if cfg.reward.model is None else {"reward.model": cfg.reward.model}
    named |= {f"reward.ensemble[{i}]": path for i, path in enumerate(cfg.reward.ensemble)}
    for key, path in named.items():
        if is_local(path):
            _require_head(key, path)
        step_settings(key, path, cfg.reward.steps)


def _require_head(key: str, path: str) -> None:
    head = saved_head(path)
    if head is None:
        raise ModelError(
            f"{key} {path} has no reward head: it is a language model or a bare encoder",
            fix="train a reward model on it first (`tutelage run` with algorithm: reward_model) and give that folder",
        )
    if head.kind == "value":
        raise ModelError(f"{key} {path} is a critic, not a reward model", fix="give the folder of a reward model")


def step_settings(key: str, path: str, steps: str | None) -> dict[str, Any] | None:
    """What a process reward model says of its steps; None for another model.

    key: of the recipe, for errors; steps: `reward.steps`.  Raises as `require_reward_models`.
    """
    file = Path(path).expanduser() / STEPS_FILE
    if file.is_file():
        about = read_json(file)
        lacking = [name for name in ("separator", "loss") if name not in about]
        if lacking:
            raise ModelError(f"{file} does not say {' and '.join(lacking)}", fix="restore the model folder")
        return about
    if steps is not None:
        raise ConfigError(
            f"reward.steps is {steps}, but {key} {path} is no process reward model: it has no {STEPS_FILE}",
            fix="remove reward.steps, or name a model that was trained with reward_model.loss step_bce or step_mse",
        )
    return None
