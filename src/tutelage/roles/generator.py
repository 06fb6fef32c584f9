"""The generator: a rollout engine in processes of its own, which gets the actor's weights after each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from tutelage.layout import Dispatch
from tutelage.rollout.partial import Carried, PartialRollout
from tutelage.types import Prompts, Rollout


class ReceivingEngine(Protocol):
    """A rollout engine whose weights come from elsewhere: over a wire of its own, or as whole tensors by name."""

    def generate(self, prompts: Prompts) -> Rollout: ...
    def join(self, address: tuple[str, int], world: int, offset: int) -> None: ...
    def receive(self, version: int) -> Any: ...
    def load_weights(self, named: Any, version: int) -> None: ...


class Generator:
    """workers   processes of one engine that receive weights.
    rank      of this engine among its like.
    partial   the same engine, for responses that are cut and carried over; all of its ranks do the same work.
    """

    DISPATCH: ClassVar[dict[str, Dispatch]] = {"generate": Dispatch.GENERATE}

    def __init__(self, rollout: ReceivingEngine, rank: int, workers: int, partial: PartialRollout) -> None:
        self.rollout = rollout
        self.partial = partial
        self.rank = rank
        self.workers = workers

    def generate(self, prompts: Prompts) -> Rollout:
        return self.rollout.generate(prompts)

    def generate_partial(
        self, prompts: Prompts, carried: Carried | None, budget_tokens: int | None
    ) -> tuple[Rollout, Carried]:
        """Responses that are finished within the budget, and the rest to be carried over."""
        return self.partial.generate_partial(prompts, carried, budget_tokens)

    def receivers(self) -> int:
        """Processes of this engine that take part in a publication."""
        return self.workers

    def join(self, address: tuple[str, int], world: int) -> None:
        """Open the receiving side; blocks until the actor connects."""
        self.rollout.join(address, world, 1 + self.rank * self.workers)

    def receive(self, version: int) -> dict[str, float]:
        """One publication, while the actor sends it: bytes and seconds at this engine."""
        return dict(vars(self.rollout.receive(version)))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Every weight by its name in a checkpoint."""
        self.rollout.load_weights(weights.items(), version)
