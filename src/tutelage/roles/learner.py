"""A model that is trained: the SFT policy, or the reward model under training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from tutelage.layout import Dispatch
from tutelage.protocols import Engine, Loss
from tutelage.types import Ragged, Sequences, Stats

Exporting = Callable[[Path], AbstractContextManager[None]]
"""Wraps the writing of a model folder: what is done to the model before it, and added to the folder after it."""


class Learner:
    """step, evaluate, state and export of one engine."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {
        "step": Dispatch.MINIBATCH,
        "evaluate": Dispatch.MINIBATCH,
        "scores": Dispatch.ROWS,
        "logprobs": Dispatch.ROWS,
        "log_collisions": Dispatch.ROWS,
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

    def logprobs(self, batch: Any) -> Ragged:
        """(R,) for a policy: logprobs of the response tokens of `batch.sequences`, without gradient, temperature 1."""
        return self.engine.logprobs(batch.sequences, 1.0)

    def log_collisions(self, batch: Any) -> Ragged:
        """(R,) for a policy: log sum_v p_v^2 at each response token, without gradient, temperature 1."""
        return self.engine.log_collisions(batch.sequences, 1.0)

    def save_state(self, folder: Path) -> None:
        """Weights, moments and updates, for `load_state` on any number of ranks."""
        self.engine.save_state(folder)

    def load_state(self, folder: Path) -> None:
        self.engine.load_state(folder)

    def checkpoint_bytes(self) -> int:
        """What `save_state` and `save_pretrained` write together, at most."""
        return self.engine.checkpoint_bytes()

    def save_pretrained(self, folder: Path) -> None:
        """A Hugging Face folder, and what the build adds to it."""
        with self.exporting(folder):
            self.engine.save_pretrained(folder)
