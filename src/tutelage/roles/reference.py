"""The reference: the policy as it was passed in, never trained, never adapted."""

from __future__ import annotations

from typing import ClassVar

from tutelage.layout import Dispatch
from tutelage.protocols import Engine
from tutelage.types import Ragged, Rollout


class Reference:
    """Either a frozen snapshot with an engine of its own, or the actor's engine with its adapter switched off."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {"logprobs": Dispatch.ROWS}

    def __init__(self, engine: Engine, temperature: float, *, adapter: bool) -> None:
        self.engine = engine
        self.temperature = temperature
        self.adapter = adapter

    def logprobs(self, rollout: Rollout) -> Ragged:
        """(R,) under the same temperature as the policy's."""
        return self.engine.logprobs(rollout.sequences, self.temperature, adapter=self.adapter)
