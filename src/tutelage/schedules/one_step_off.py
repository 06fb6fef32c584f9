"""One step off: the rollouts of step k + 1 are generated while step k is learned."""

from __future__ import annotations

from typing import Any

from tutelage.protocols import Algorithm, Pending, Transport
from tutelage.schedules.saved import packed, unpacked
from tutelage.schedules.training import Draw, Publications, StepResult, Training, generating


class OneStepOff:
    """Submit generation k + 1 under the weights in place, learn on k, publish (Noukhovitch et al. 2025).

    From the second step on every rollout is one weight version old, exactly.  What is computed on the rollouts besides
    (old logprobs, values, scores) is computed in their own step.  Raises ConfigError for an algorithm that does not
    generate.
    """

    LOOKS_AHEAD = True
    refills = 0

    def __init__(self, algorithm: Algorithm, transport: Transport, roles: Any, cfg: Any) -> None:
        self.algorithm = generating(algorithm, "one_step_off")
        self.training = Training(algorithm, transport, roles, cfg)
        self.publications = Publications()
        self.ahead: Pending | None = None
        self.prompts_ahead = 0

    def advance(self, draw: Draw, state: Any) -> StepResult | None:
        training = self.training
        if self.ahead is None:
            self._begin(draw)
        rollout = self.ahead
        if rollout is None:
            return None
        self._begin(draw)
        result, published = training.update(self.algorithm.infer(rollout, training.roles, training.cfg), state)
        self.publications.follow(published)
        return training.with_staleness(result, state, {"buffered": self.prompts_ahead})

    def _begin(self, draw: Draw) -> None:
        """Send off the generation of the next batch; `ahead` is None where there is none."""
        batch, training = draw(), self.training
        self.ahead, self.prompts_ahead = None, 0
        if batch is not None:
            prompts = training.transport.put(batch)
            self.ahead = self.algorithm.generate(prompts, training.roles, training.cfg)
            self.prompts_ahead = len(batch)

    def state(self) -> dict[str, Any]:
        """The rollouts of the next step, gathered; publications have arrived."""
        self.publications.settle()
        if self.ahead is None:
            return {"prompts_ahead": 0}
        return {"prompts_ahead": self.prompts_ahead, "ahead": packed(self.ahead.gather())}

    def load_state(self, saved: dict[str, Any]) -> None:
        self.prompts_ahead = saved["prompts_ahead"]
        self.ahead = self.training.transport.put(unpacked(saved["ahead"])) if "ahead" in saved else None
