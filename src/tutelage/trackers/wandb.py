"""Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tutelage.errors import ConfigError, MissingExtraError

WandbMode = Literal["online", "offline", "disabled"]
RUN_ID = "wandb_run_id.txt"


class WandbTracker:
    """A `protocols.Tracker`.

    mode: online, offline (files in RUN/wandb, sent later by `wandb sync`) or disabled; None leaves it to wandb's own
    settings (WANDB_MODE, `wandb offline`).  The run id is kept in RUN/wandb_run_id.txt, so that a resumed run goes on
    in the same one.  The step is a metric of its own and the x axis of all others: wandb's internal step only grows,
    and would drop the steps that a resumed run takes again.

    Raises MissingExtraError where wandb is not installed, ConfigError when it does not start (no login, no network).
    """

    def __init__(
        self,
        run_folder: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        first_step: int = 0,
        mode: WandbMode | None = None,
        project: str = "tutelage",
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                f"tracking with Weights & Biases needs the wandb package: {error}", fix="pip install 'tutelage[wandb]'"
            ) from error
        known = run_folder / RUN_ID
        settings: dict[str, Any] = {"mode": mode} if mode is not None else {}
        if first_step and known.is_file():
            settings |= {"id": known.read_text(encoding="utf-8").strip(), "resume": "allow"}
        run_folder.mkdir(parents=True, exist_ok=True)
        try:
            self.run = wandb.init(project=project, name=run_name, config=dict(config), dir=str(run_folder), **settings)
        except Exception as error:
            raise ConfigError(
                f"Weights & Biases did not start: {error}",
                fix="log in with `wandb login`, or write to disk only with WANDB_MODE=offline",
            ) from error
        known.write_text(f"{self.run.id}\n", encoding="utf-8")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def close(self) -> None:
        self.run.finish()
