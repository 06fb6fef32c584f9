"""TensorBoard: event files in RUN/tensorboard, read with `tensorboard --logdir`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tutelage.errors import MissingExtraError


class TensorBoardTracker:
    """A `protocols.Tracker`.  Raises MissingExtraError where tensorboard is not installed."""

    def __init__(self, run_folder: Path, run_name: str, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                f"tracking with TensorBoard needs the tensorboard package: {error}",
                fix="pip install 'tutelage[tensorboard]'",
            ) from error
        self.writer = SummaryWriter(str(run_folder / "tensorboard"), purge_step=first_step or None)
        if not first_step:
            text = json.dumps(config, indent=2, default=str)
            indented = "\n".join(f"    {line}" for line in text.splitlines())
            self.writer.add_text("config", f"{run_name}\n\n{indented}", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()
