"""What an evaluation is: metrics, and one number that says how good the model is on data it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tutelage.protocols import Loss


@dataclass(frozen=True)
class Evaluation:
    """metrics: named numbers for metrics.jsonl.  quality: larger is better; measured_by: the metric it is.

    details: what the summary keeps besides, such as intervals.
    """

    metrics: Mapping[str, float]
    quality: float
    measured_by: str
    details: Mapping[str, Any] = field(default_factory=dict)


class Evaluator(Protocol):
    def evaluate(self, phase: str, step: int) -> Evaluation:
        """phase: "before", "step" or "after"."""
        ...

    def state(self) -> dict[str, Any]:
        """What later evaluations compare with; part of every checkpoint."""
        ...

    def load_state(self, saved: Mapping[str, Any]) -> None: ...


class HeldOutLoss:
    """The training loss on held-out items; quality is accuracy where the loss reports one, else minus the loss.

    complete  adds what the loss reads besides the data, such as the reference's logprobs: once, before the first use.
    """

    def __init__(
        self, role: Any, batch: Any, loss: Loss, max_rows: int, complete: Callable[[Any], Any] | None = None
    ) -> None:
        self.role = role
        self.batch = batch.select(torch.arange(min(len(batch), max_rows)))
        self.loss = loss
        self.complete = complete

    def state(self) -> dict[str, Any]:
        """Nothing: every evaluation stands alone."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        pass

    def evaluate(self, phase: str, step: int) -> Evaluation:
        if self.complete is not None:
            self.batch, self.complete = self.complete(self.batch), None
        stats = self.role.evaluate(self.batch, self.loss).gather()
        metrics = {f"eval/{name}": stat.mean for name, stat in stats.items()}
        if "eval/accuracy" in metrics:
            return Evaluation(metrics, metrics["eval/accuracy"], "eval/accuracy", {"rows": len(self.batch)})
        return Evaluation(metrics, -metrics["eval/loss"], "minus eval/loss", {"rows": len(self.batch)})
