"""The reference: the policy as it was passed in, never trained, never adapted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from tutelage.engines.following import FollowingWeights
from tutelage.errors import RolloutError, TrainingError
from tutelage.layout import Dispatch
from tutelage.protocols import Engine, RolloutEngine
from tutelage.rollout.duels import duels
from tutelage.types import Prompts, Ragged, Rollout, Stat, Stats


class Reference:
    """Either a frozen snapshot with an engine of its own, or the actor's engine with its adapter switched off.

    rollout  what generates as the other side of a pair, where the algorithm has one: the reference itself, or its
             mixture with the policy.
    following  what lets its weights follow the policy's, where the algorithm moves them; they are then a state of the
             run, and a part of its checkpoints.
    """

    DISPATCH: ClassVar[dict[str, Dispatch]] = {
        "logprobs": Dispatch.ROWS,
        "generate": Dispatch.GENERATE,
        "beside": Dispatch.GENERATE,
    }

    def __init__(
        self,
        engine: Engine,
        temperature: float,
        *,
        adapter: bool,
        rollout: RolloutEngine | None = None,
        following: FollowingWeights | None = None,
    ) -> None:
        self.engine = engine
        self.temperature = temperature
        self.adapter = adapter
        self.rollout = rollout
        self.following = following

    def logprobs(self, rollout: Rollout) -> Ragged:
        """(R,) under the same temperature as the policy's."""
        return self.engine.logprobs(rollout.sequences, self.temperature, adapter=self.adapter)

    def generate(self, prompts: Prompts) -> Rollout:
        """The other side's responses.  Raises RolloutError where this stage built none."""
        if self.rollout is None:
            raise RolloutError(
                "the reference of this stage does not generate", fix="generate with the actor, or use xpo or nash_md"
            )
        return self.rollout.generate(prompts)

    def beside(self, own: Rollout, rival: Rollout) -> Rollout:
        """(2B) the policy's responses and the other side's, those of a pair adjacent (`rollout.duels`)."""
        return duels(own, rival)

    # ---- a reference that follows the policy

    def follow(self, weights: Mapping[str, Tensor], alpha: float) -> Stats:
        """Weights <- alpha * these + (1 - alpha) * weights; how far they went, root mean square."""
        return {"reference_moved": Stat(self._following().follow(weights, alpha), 1)}

    def save_state(self, folder: Path) -> None:
        self._following().save(folder)

    def load_state(self, folder: Path) -> None:
        self._following().load(folder)

    def checkpoint_bytes(self) -> int:
        return self._following().bytes()

    def _following(self) -> FollowingWeights:
        if self.following is None:
            raise TrainingError(
                "this reference is fixed: it is the policy as it was passed in", fix="set dpo.sync_every above 0"
            )
        return self.following
