"""The critic: V before each response token, and after the last."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tutelage.layout import Dispatch
from tutelage.protocols import Engine, Loss
from tutelage.types import Ragged, Rollout, Stats


class Critic:
    """A scalar model that is trained."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {"values": Dispatch.ROWS, "step": Dispatch.MINIBATCH}

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def values(self, rollout: Rollout) -> Ragged:
        """(R + B): rows one longer than the responses; the last entry is the bootstrap value."""
        return self.engine.values(rollout.sequences)

    def step(self, batch: Rollout, loss: Loss) -> Stats:
        return self.engine.step(batch, loss)

    def save_state(self, folder: Path) -> None:
        """Weights, moments and updates, for `load_state` on any number of ranks."""
        self.engine.save_state(folder)

    def load_state(self, folder: Path) -> None:
        self.engine.load_state(folder)

    def checkpoint_bytes(self) -> int:
        """What `save_state` and `save_pretrained` write together, at most."""
        return self.engine.checkpoint_bytes()

    def save_pretrained(self, folder: Path) -> None:
        self.engine.save_pretrained(folder)
