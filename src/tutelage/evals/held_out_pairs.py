"""Held-out pairs under a reference that moves, and how far preference data lies from the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tutelage.alarms import Alarm
from tutelage.errors import RolloutError
from tutelage.evals.evaluation import Evaluation, HeldOutLoss
from tutelage.protocols import Loss
from tutelage.types import Pairs, Prompts, Ragged


@dataclass(frozen=True)
class MovingHeldOutPairs:
    """`HeldOutLoss` whose reference is asked again in every evaluation."""

    role: Any
    batch: Pairs
    loss: Loss
    max_rows: int
    complete: Callable[[Any], Any]

    def state(self) -> dict[str, Any]:
        """Nothing: every evaluation stands alone."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        pass

    def evaluate(self, phase: str, step: int) -> Evaluation:
        return HeldOutLoss(self.role, self.batch, self.loss, self.max_rows, self.complete).evaluate(phase, step)


def per_token(logp: Ragged, trained: Tensor | None = None) -> float:
    """Mean over (trained) tokens, nats."""
    values = logp.flat.double() if trained is None else logp.flat.double()[trained]
    return float(values.mean())


@dataclass
class DataDistance:
    """Logprob per token of the chosen answers against that of the policy's own samples to the same prompts.

    Answers that the policy would hardly write teach it about a region it does not visit (Tajwar et al. 2024,
    arXiv:2404.14367); DPO then often lowers the likelihood of both answers.  Measured once, before the first step.  It
    is watched as alarms are: it rings in the first step, and its numbers are part of checkpoints and of the summary.

    bound  nats per token at which it rings.
    """

    bound: float
    found: dict[str, Any] = field(default_factory=dict)
    rung: bool = False

    def measure(self, actor: Any, pairs: Pairs) -> None:
        """actor: a handle that generates; pairs: a sample of the training data."""
        prompts = prompts_of(pairs)
        try:
            rollout = actor.generate(prompts).gather()
        except RolloutError as error:
            self.found = {"not_measured": error.what}
            return
        chosen, rejected = pairs.sides(actor.logprobs(pairs).gather())
        own = per_token(rollout.rollout_logp)
        self.found = {
            "own_samples_logp_per_token": own,
            "chosen_logp_per_token": per_token(chosen, pairs.chosen.trained.flat),
            "rejected_logp_per_token": per_token(rejected, pairs.rejected.trained.flat),
            "prompts": len(prompts),
        }
        self.found["chosen_below_own"] = own - self.found["chosen_logp_per_token"]

    def check(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """One alarm, once, where the data is far away."""
        below = self.found.get("chosen_below_own")
        if self.rung or below is None or below <= self.bound:
            return []
        self.rung = True
        return [
            Alarm(
                "data_distance",
                f"chosen answers have {self.found['chosen_logp_per_token']:.2f} nats a token under the policy, its own "
                f"samples {self.found['own_samples_logp_per_token']:.2f}: {below:.2f} apart (warning at "
                f"{self.bound:g}). Fine-tune on the chosen answers first (algorithm: sft), take pairs that the policy "
                "wrote, or add dpo.nll_coef",
            )
        ]

    def state(self) -> dict[str, Any]:
        return {"found": self.found, "rung": self.rung}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self.found, self.rung = dict(saved.get("found", {})), bool(saved.get("rung", False))

    def summary(self) -> dict[str, Any]:
        return {"data_distance": self.found or None}


def prompts_of(pairs: Pairs) -> Prompts:
    """The distinct prompts of these pairs, to be answered once each."""
    rows = list(dict.fromkeys(tuple(row) for row in pairs.chosen.prompt_rows()))
    count = len(rows)
    return Prompts(
        tokens=tuple(rows),
        ids=tuple(f"distance-{number}" for number in range(count)),
        truths=(None,) * count,
        messages=((),) * count,
        purpose="distance",
    )


def sample_of(pairs: Pairs, order: Tensor, count: int) -> Pairs:
    """The first `count` pairs in an order."""
    return pairs.select(order[: min(count, len(pairs))].to(torch.int64))
