"""A model that is trained: the SFT policy, or the reward model under training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from tutelage.layout import Dispatch
from tutelage.protocols import Engine, Loss
from tutelage.types import Sequences, Stats

Exporting = Callable[[Path], AbstractContextManager[None]]
"""Wraps the writing of a model folder: what is done to the model before it, and added to the folder after it."""


class Learner:
    """step, evaluate, state and export of one engine."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {
        "step": Dispatch.MINIBATCH,
        "evaluate": Dispatch.MINIBATCH,
        "scores": Dispatch.ROWS,
    }

    def __init__(self, engine: Engine, exporting: Exporting) -> None:
        self.engine = engine
        self.exporting = exporting

    def step(self, batch: Any, loss: Loss) -> Stats:
        return self.engine.step(batch, loss)

    def evaluate(self, batch: Any, loss: Loss) -> Stats:
        return self.engine.evaluate(batch, loss)

    def scores(self, sequences: Sequences) -> Tensor:
        """(B,) for a reward model under training."""
        return self.engine.scores(sequences)

    def state(self) -> dict[str, Any]:
        return self.engine.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.engine.load_state(state)

    def save_pretrained(self, folder: Path) -> None:
        """A Hugging Face folder, and what the build adds to it."""
        with self.exporting(folder):
            self.engine.save_pretrained(folder)
