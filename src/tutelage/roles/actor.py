"""The actor: the policy that generates, reports its own logprobs, and is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tutelage.layout import Dispatch
from tutelage.protocols import Engine, Loss, RolloutEngine
from tutelage.roles.learner import Exporting
from tutelage.types import Prompts, Ragged, Rollout, Stats


class Actor:
    """temperature divides the logits in sampling and in every logprob, here and in the reference."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {
        "generate": Dispatch.GENERATE,
        "logprobs": Dispatch.ROWS,
        "step": Dispatch.MINIBATCH,
    }

    def __init__(self, engine: Engine, rollout: RolloutEngine, temperature: float, exporting: Exporting) -> None:
        self.engine = engine
        self.exporting = exporting
        self.rollout = rollout
        self.temperature = temperature

    def generate(self, prompts: Prompts) -> Rollout:
        return self.rollout.generate(prompts)

    def logprobs(self, rollout: Rollout) -> Ragged:
        """(R,) logprobs of the response tokens under the present weights, without gradient."""
        return self.engine.logprobs(rollout.sequences, self.temperature)

    def step(self, batch: Rollout, loss: Loss) -> Stats:
        return self.engine.step(batch, loss)

    def publish(self, version: int) -> None:
        self.rollout.publish(version)

    def state(self) -> dict[str, Any]:
        return self.engine.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.engine.load_state(state)

    def save_pretrained(self, folder: Path) -> None:
        """A Hugging Face folder, and what the build adds to it."""
        with self.exporting(folder):
            self.engine.save_pretrained(folder)
