"""The order of a hybrid engine, in which training and generation take turns on the same device."""

from __future__ import annotations

from enum import Enum

from tutelage.errors import RolloutError


class Phase(Enum):
    """Where the rollout engine stands."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS = "weights are awake"
    PUBLISHED = "weights are published"
    FREED = "the trainer's memory is free"


class HybridOrder:
    """generate -> sleep -> (training) -> wake weights -> publish -> trainer freed -> wake KV cache -> generate.

    Weights wake first, because publication writes into them; the KV cache, which is the largest, wakes last, when the
    trainer has given its memory back.  After level 1 the weights come back as they were, so publication may be left
    out; after level 2 they are gone and it may not.  Without sleep, weights are published at any time.

    Each method moves to the next phase or raises RolloutError, and nothing else changes then.
    """

    def __init__(self) -> None:
        self.phase = Phase.AWAKE
        self.level = 0

    def sleep(self, level: int) -> None:
        """level 1: weights are kept on the host; level 2: they are dropped.  The KV cache is dropped in both."""
        if level not in (1, 2):
            raise RolloutError(f"sleep level is {level}", fix="1 keeps the weights on the host, 2 drops them")
        self._require("sleep", Phase.AWAKE)
        self.phase, self.level = Phase.ASLEEP, level

    def wake_weights(self) -> None:
        self._require("wake the weights", Phase.ASLEEP)
        self.phase = Phase.WEIGHTS

    def publish(self) -> None:
        """Weights were written, all of them."""
        self.require_publishable()
        if self.phase is Phase.WEIGHTS:
            self.phase = Phase.PUBLISHED

    def require_publishable(self) -> None:
        self._require("publish weights", Phase.AWAKE, Phase.WEIGHTS, Phase.PUBLISHED)

    def trainer_freed(self) -> None:
        """The caller has moved what the trainer holds off the device."""
        kept = (Phase.WEIGHTS,) if self.level == 1 else ()
        self._require("free the trainer's memory", Phase.PUBLISHED, *kept)
        self.phase = Phase.FREED

    def wake_kv_cache(self) -> None:
        self._require("wake the KV cache", Phase.FREED)
        self.phase, self.level = Phase.AWAKE, 0

    def require_awake(self) -> None:
        self._require("generate", Phase.AWAKE)

    def _require(self, what: str, *allowed: Phase) -> None:
        if self.phase not in allowed:
            raise RolloutError(
                f"cannot {what}: the engine's phase is {self.phase.value!r}"
                + (f" after sleep level {self.level}" if self.level else ""),
                fix="the order is sleep, wake weights, publish, trainer_freed, wake kv_cache, generate",
            )
