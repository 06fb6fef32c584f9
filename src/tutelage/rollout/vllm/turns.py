"""vLLM and the trainer on the same devices, one after the other: who sleeps when."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.rollout.partial import Carried
from tutelage.rollout.vllm.engine import VLLMRollout
from tutelage.types import Prompts, Rollout


class TakingTurns:
    """Implements `protocols.RolloutEngine`: the engine sleeps from the first update of a step until `publish`.

    publish wakes the weights, fills them, gives back what the trainer's allocator holds unused, and wakes the KV cache
    last.  level 0: nothing sleeps.
    adapter  writes the policy's adapter into a folder, for an engine that takes adapters; None: whole weights.
    """

    def __init__(self, rollout: VLLMRollout, level: int, adapter: Callable[[Path], None] | None = None) -> None:
        self.rollout = rollout
        self.adapter = adapter
        self.level = level
        self.asleep = False

    def generate(self, prompts: Prompts) -> Rollout:
        return self.rollout.generate(prompts)

    def generate_partial(
        self, prompts: Prompts, carried: Carried | None = None, budget_tokens: int | None = None
    ) -> tuple[Rollout, Carried]:
        return self.rollout.generate_partial(prompts, carried, budget_tokens)

    def rest(self) -> None:
        """Training begins."""
        if self.level and not self.asleep:
            self.rollout.sleep(self.level)
            self.asleep = True

    def publish(self, version: int) -> None:
        self._awake(lambda: self._published(version))

    def _published(self, version: int) -> None:
        if self.adapter is None:
            self.rollout.publish(version)
            return
        with tempfile.TemporaryDirectory() as folder:
            self.adapter(Path(folder))
            self.rollout.load_adapter(folder, version)

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._awake(lambda: self.rollout.load_weights(named, version))

    def join(self, address: tuple[str, int], world: int, offset: int) -> None:
        self.rollout.join(address, world, offset)

    def receive(self, version: int) -> Any:
        return self.rollout.receive(version)

    def _awake(self, publish: Any) -> None:
        if not self.asleep:
            publish()
            return
        self.rollout.wake("weights")
        publish()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.rollout.trainer_freed()
        self.rollout.wake("kv_cache")
        self.asleep = False
