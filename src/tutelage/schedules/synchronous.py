"""Generate, learn, publish, in this order: every rollout comes from the newest weights."""

from __future__ import annotations

from typing import Any, cast

from tutelage.protocols import Algorithm, Transport
from tutelage.schedules.refill import Refilling, filled, refills_of
from tutelage.schedules.streaming import Streamed
from tutelage.schedules.training import Draw, StepResult, Training


class Synchronous:
    """learn(advantages(collect(batch))), then publish.  For every algorithm.

    Where the algorithm drops groups that say nothing, a step draws and collects further batches (`refill.filled`).
    What it does not keep is dropped: only the cursor of the data knows of it, and a checkpoint holds no rollouts.
    With `schedule.stream` responses are scored while others decode (`streaming.Streamed`).
    """

    LOOKS_AHEAD = False

    def __init__(self, algorithm: Algorithm, transport: Transport, roles: Any, cfg: Any) -> None:
        self.algorithm = algorithm
        self.training = Training(algorithm, transport, roles, cfg)
        self.refills = refills_of(algorithm, cfg)
        self.stream = bool(getattr(getattr(cfg, "schedule", None), "stream", False))

    def advance(self, draw: Draw, state: Any) -> StepResult | None:
        if self.refills:
            return self.filled_step(draw, state)
        batch = draw()
        return None if batch is None else self.step(batch, state)

    def filled_step(self, draw: Draw, state: Any) -> StepResult | None:
        """One step on as many informative groups as a batch has prompts, drawn for as long as that takes."""
        training = self.training
        algorithm = cast(Refilling, self.algorithm)
        found = filled(
            draw, training.transport, algorithm, training.roles, training.cfg, self.refills, stream=self.stream
        )
        if found is None:
            return None
        result = self.learned(found.collected, state)
        if not found.stats:  # nothing ran, so there is nothing to add to
            return result
        return StepResult(result.batch, result.state, {**result.stats, **found.stats}, found.notes)

    def step(self, batch: Any, state: Any) -> StepResult:
        """One step on one batch."""
        training = self.training
        roles = Streamed(training.roles, training.transport) if self.stream else training.roles
        return self.learned(self.algorithm.collect(training.transport.put(batch), roles, training.cfg), state)

    def learned(self, collected: Any, state: Any) -> StepResult:
        """Learn from a collected batch, and publish."""
        result, published = self.training.update(collected, state)
        for publication in published:
            publication.gather()  # an error on the way to the rollout engine arrives here
        return result

    def state(self) -> dict[str, Any]:
        """Nothing is begun ahead."""
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:
        pass
