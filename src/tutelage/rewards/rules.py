"""Rules as reward sources: functions of yours and built-in ones, named in a recipe, checked row by row.

How they are named: `rewards.loading`; with what they are called: `rewards.calls`; where they run: `rewards.isolation`.
Shapes: B sequences.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import RewardError
from tutelage.rewards.calls import Columns, Outcome, manner_of
from tutelage.rewards.checks import prompt_text, row_name
from tutelage.rewards.isolation import RuleProcesses
from tutelage.rewards.loading import REWARD_RULE, load_rule, name_of
from tutelage.rewards.worker import Order
from tutelage.types import Rollout

__all__ = ["RuleSource", "load_rule"]


class RuleSource:
    """A rule as a reward source.

    spec, settings  see `rewards.loading`; file paths are taken from `folder` (default: the working directory).
    name            default: the function's.        what: how messages call it.
    seconds         deadline of one response.    concurrency: responses judged at once (None: 1, async 32).
    Raises RewardError when the rule cannot be loaded.
    """

    def __init__(
        self,
        spec: str,
        *,
        name: str | None = None,
        folder: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        seconds: float = 10.0,
        concurrency: int | None = None,
        what: str = REWARD_RULE,
    ) -> None:
        self.spec = spec
        self.name = name or name_of(spec)
        self.what = what
        manner_of(load_rule(spec, folder, settings, what), spec, what)
        order = Order(spec, Path(os.path.abspath(folder or Path.cwd())), dict(settings or {}), what)
        self.processes = RuleProcesses(order, seconds, concurrency)

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32.  Raises RewardError, naming rule, row and cause, for the first response without a score."""
        outcomes = self.processes.judge(columns_of(rollout), all_errors=False)
        bad = [row for row, outcome in enumerate(outcomes) if outcome.error]
        if bad:
            raise self._error(outcomes[bad[0]], rollout, bad)
        return torch.tensor([outcome.value for outcome in outcomes], dtype=torch.float32)

    def attempt(self, rollout: Rollout) -> tuple[Tensor, tuple[str, ...]]:
        """(B,) float32, NaN where there is no score, and B reasons, "" where there is one.

        Raises RewardError only for what is wrong with the rule as a whole, such as a wrong number of scores.
        """
        outcomes = self.processes.judge(columns_of(rollout), all_errors=True)
        return (
            torch.tensor([outcome.value for outcome in outcomes], dtype=torch.float32),
            tuple(self._reason(outcome) for outcome in outcomes),
        )

    def close(self) -> None:
        """End its processes; they would end with this object anyway."""
        self.processes.close()

    def _reason(self, outcome: Outcome) -> str:
        if not outcome.error:
            return ""
        detail = f": {outcome.detail}" if outcome.detail else ""
        return f"{self.name} {outcome.error} this response{detail}"

    def _error(self, outcome: Outcome, rollout: Rollout, bad: list[int]) -> RewardError:
        detail = f": {outcome.detail}" if outcome.detail else ""
        more = f", and {len(bad) - 1} more row{'s' * (len(bad) > 2)}" if len(bad) > 1 else ""
        fix = outcome.fix or (
            f"make {self.spec} return a finite number for every response, also an empty or odd one"
            if outcome.error.startswith("returned")
            else f"correct {self.spec}; it must accept every response, also an empty one"
        )
        return RewardError(
            f"{self.what} {self.spec} {outcome.error} {row_name(rollout, bad[0])}{detail}{more}", fix=fix
        )


def columns_of(rollout: Rollout) -> Columns:
    """What rules see: text without special tokens, and of each response the number of tokens the policy produced."""
    return Columns(
        prompts=[prompt_text(messages) for messages in rollout.messages],
        messages=[list(messages) for messages in rollout.messages],
        responses=list(rollout.texts),
        truths=list(rollout.truths),
        tokens=[int(row.sum()) for row in rollout.sequences.trained.rows()],
        finished=[bool(finished) for finished in rollout.finished],
    )
