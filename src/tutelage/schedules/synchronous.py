"""Generate, learn, publish, in this order: every rollout comes from the newest weights."""

from __future__ import annotations

from typing import Any

from tutelage.protocols import Algorithm, Transport
from tutelage.schedules.training import Draw, StepResult, Training


class Synchronous:
    """learn(advantages(collect(batch))), then publish.  For every algorithm."""

    LOOKS_AHEAD = False

    def __init__(self, algorithm: Algorithm, transport: Transport, roles: Any, cfg: Any) -> None:
        self.algorithm = algorithm
        self.training = Training(algorithm, transport, roles, cfg)

    def advance(self, draw: Draw, state: Any) -> StepResult | None:
        batch = draw()
        return None if batch is None else self.step(batch, state)

    def step(self, batch: Any, state: Any) -> StepResult:
        """One step on one batch."""
        training = self.training
        collected = self.algorithm.collect(training.transport.put(batch), training.roles, training.cfg)
        result, published = training.update(collected, state)
        for publication in published:
            publication.gather()  # an error on the way to the rollout engine arrives here
        return result

    def state(self) -> dict[str, Any]:
        """Nothing is begun ahead."""
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:
        pass
