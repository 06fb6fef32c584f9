"""The critic: V before each response token, and after the last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

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

    def state(self) -> dict[str, Any]:
        return self.engine.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.engine.load_state(state)

    def save_pretrained(self, folder: Path) -> None:
        self.engine.save_pretrained(folder)
