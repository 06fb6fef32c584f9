"""Answers to held-out prompts, the same prompts and random keys at every evaluation, scored by proxy and by gold.

Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutelage.errors import RewardError
from tutelage.evals.evaluation import Evaluation
from tutelage.math.kl import kl_k1, sequence_kl
from tutelage.math.stats import mean_interval, paired_interval
from tutelage.rewards.checks import prompt_text
from tutelage.runfolder import write_samples
from tutelage.types import Prompts, Rollout

Gold = Callable[[str, str], float]


class HeldOutAnswers:
    """Samples one answer per held-out prompt and compares it with the answer before training.

    Quality is the gold score where there is one; else the proxy less kl_coef times the sequence KL, which a policy
    cannot raise by leaving the reference alone; without a reference, the proxy.
    """

    def __init__(self, roles: Any, prompts: Prompts, gold: Gold | None, folder: Path, kl_coef: float) -> None:
        self.roles = roles
        self.prompts = replace(prompts, step=0, n=1, purpose="evaluation")
        self.gold = gold
        self.folder = folder
        self.kl_coef = kl_coef
        self.before: dict[str, list[float]] = {}

    def state(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self.before = saved["before"]

    def evaluate(self, phase: str, step: int) -> Evaluation:
        rollout = self.answered()
        rows = self.rows(rollout, phase)
        write_samples(self.folder, phase if phase != "step" else f"step_{step:06d}", rows)
        scores = {"proxy": [row["proxy"] for row in rows]}
        if self.gold is not None:
            scores["gold"] = [row["gold"] for row in rows]
        if phase == "before":
            self.before = scores
        metrics = {f"eval/{name}_mean": sum(values) / len(values) for name, values in scores.items()}
        if rollout.ref_logp is not None:
            kl_BT = kl_k1(rollout.column("old_logp").padded(), rollout.column("ref_logp").padded())
            metrics["eval/kl_sequence"] = float(sequence_kl(kl_BT, rollout.sequences.trained.padded()))
        metrics["eval/length_mean"] = float(rollout.sequences.response_lens.double().mean())
        metrics["eval/truncated_fraction"] = float((~rollout.finished).double().mean())
        return self.judged(metrics, scores)

    def judged(self, metrics: dict[str, float], scores: dict[str, list[float]]) -> Evaluation:
        """Quality, and the paired change since before training with its 95 % interval."""
        details: dict[str, Any] = {"prompts": len(self.prompts)}
        for name, values in scores.items():
            details[name] = interval(*mean_interval(values)) if len(values) > 1 else {"mean": values[0]}
            if name in self.before and len(values) > 1:
                details[f"{name}_change"] = interval(*paired_interval(values, self.before[name]))
        if self.gold is not None:
            return Evaluation(metrics, metrics["eval/gold_mean"], "eval/gold_mean", details)
        if self.kl_coef == 0 or "eval/kl_sequence" not in metrics:
            return Evaluation(metrics, metrics["eval/proxy_mean"], "eval/proxy_mean", details)
        quality = metrics["eval/proxy_mean"] - self.kl_coef * metrics["eval/kl_sequence"]
        return Evaluation(metrics, quality, f"eval/proxy_mean - {self.kl_coef:g} * eval/kl_sequence", details)

    def answered(self) -> Rollout:
        roles = self.roles
        rollout = roles.actor.generate(self.prompts)
        found = rollout.adding(old_logp=roles.actor.logprobs(rollout), score=roles.reward.score(rollout))
        if "reference" in roles:
            found = found.adding(ref_logp=roles.reference.logprobs(rollout))
        return found.gather()

    def rows(self, rollout: Rollout, phase: str) -> list[dict[str, Any]]:
        """One sample a row, as the report reads them."""
        assert rollout.score is not None
        ref_rows = rollout.ref_logp.rows() if rollout.ref_logp is not None else None
        return [
            {
                "id": rollout.prompt_ids[i],
                "phase": phase,
                "prompt": prompt_text(rollout.messages[i]),
                "response": rollout.texts[i],
                "proxy": float(rollout.score.total[i]),
                "gold": self.gold_of(rollout, i),
                "length": int(rollout.sequences.response_lens[i]),
                "finished": bool(rollout.finished[i]),
                "ref_logp_per_token": float(ref_rows[i].mean()) if ref_rows is not None and len(ref_rows[i]) else None,
            }
            for i in range(len(rollout))
        ]

    def gold_of(self, rollout: Rollout, i: int) -> float | None:
        if self.gold is None:
            return None
        prompt, response = prompt_text(rollout.messages[i]), rollout.texts[i]
        try:
            value = float(self.gold(prompt, response))
        except Exception as error:
            raise RewardError(
                f"the gold function failed on prompt {prompt!r} and response {response!r}: "
                f"{type(error).__name__}: {error}",
                fix="make it take (prompt, response) and return a number for every response, also an empty one",
            ) from error
        if not math.isfinite(value):
            raise RewardError(
                f"the gold function returned {value} for prompt {prompt!r} and response {response!r}",
                fix="return a finite number",
            )
        return value


def interval(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "low": low, "high": high}


def first_prompts(prompts: Prompts, count: int) -> Prompts:
    """The first `count` prompts in the order of their ids, which are hashes: a fixed sample of the held-out set."""
    order = sorted(range(len(prompts)), key=lambda i: prompts.ids[i])
    return prompts.select(order[:count])
