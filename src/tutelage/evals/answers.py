"""Answers to held-out prompts, the same prompts and random keys at every evaluation, judged by proxy, gold and rules.

Shapes: B sequences, T response tokens, P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import RewardError
from tutelage.evals.evaluation import Evaluation
from tutelage.evals.unscored import UnscoredResponses
from tutelage.evals.verifiable import PerPrompt, change, interval, mean_of, pass_at_k
from tutelage.math.kl import kl_k1, sequence_kl
from tutelage.rewards.checks import prompt_text
from tutelage.rewards.rules import RuleSource
from tutelage.roles.reward import unscored
from tutelage.runfolder import write_samples
from tutelage.types import Prompts, Rollout, Scores

Gold = Callable[[str, str], float]


@dataclass(frozen=True)
class Judging:
    """How held-out answers are made and judged besides proxy and gold.

    rules    by their names in the metrics.     samples: answers to each prompt.   greedy: the most likely tokens.
    pass_at  the k of pass@k, of the answers with the full mark of a rule, 1.
    skip     an answer without a score is left out and counted; else it raises.
    """

    rules: Mapping[str, RuleSource] = field(default_factory=dict)
    samples: int = 1
    greedy: bool = False
    pass_at: tuple[int, ...] = ()
    skip: bool = False


class HeldOutAnswers:
    """Answers to held-out prompts, compared with the answers before training.

    Quality is the gold score where there is one; else the proxy less kl_coef times the sequence KL, which a policy
    cannot raise by leaving the reference alone; without a reference, or with greedy answers (whose log-ratio estimates
    no KL), the proxy.  Every number is a mean over prompts of the mean over their answers.
    """

    def __init__(
        self,
        roles: Any,
        prompts: Prompts,
        gold: Gold | None,
        folder: Path,
        kl_coef: float,
        judging: Judging | None = None,
    ) -> None:
        self.roles = roles
        self.judging = judging or Judging()
        samples, greedy = self.judging.samples, self.judging.greedy
        self.prompts = replace(prompts, step=0, n=samples, purpose="evaluation", greedy=greedy)
        self.gold = gold
        self.folder = folder
        self.kl_coef = kl_coef
        self.unscored = UnscoredResponses(roles, folder) if self.judging.skip else None
        self.before: dict[str, PerPrompt] = {}

    def state(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self.before = saved["before"]

    def evaluate(self, phase: str, step: int) -> Evaluation:
        rollout = self.answered()
        assert rollout.score is not None
        judged = {name: self.judge(source, rollout) for name, source in self.judging.rules.items()}
        rows = self.rows(rollout, phase, judged)
        kept = torch.nonzero(rollout.score.valid).squeeze(1).tolist()
        write_samples(self.folder, phase if phase != "step" else f"step_{step:06d}", [rows[i] for i in kept])
        columns = {"proxy": [row["proxy"] for row in rows]}
        if self.gold is not None:
            columns["gold"] = [row["gold"] for row in rows]
        scores = {name: self.per_prompt(rollout, values) for name, values in columns.items()}
        rules = {name: self.per_prompt(rollout, [r[f"rule/{name}"] for r in rows]) for name in judged}
        metrics = {f"eval/{name}_mean": mean_of(values) for name, values in scores.items()}
        metrics |= {f"eval/rule/{name}": mean_of(values) for name, values in rules.items()}
        metrics |= self.passes(rollout, judged)
        if rollout.ref_logp is not None:
            kl_BT = kl_k1(rollout.column("old_logp").padded(), rollout.column("ref_logp").padded())
            metrics["eval/kl_sequence"] = float(sequence_kl(kl_BT, rollout.sequences.trained.padded()))
        metrics["eval/length_mean"] = float(rollout.sequences.trained.padded().sum(dim=1).double().mean())
        metrics["eval/truncated_fraction"] = float((~rollout.finished).double().mean())
        if self.unscored is not None:
            metrics["eval/errors"] = float(self.record(self.unscored, step, phase, rollout, judged))
        if phase == "before":
            self.before = {**scores, **{f"rule/{name}": values for name, values in rules.items()}}
        return self.judged(metrics, scores, rules)

    def judged(
        self, metrics: dict[str, float], scores: dict[str, list[float | None]], rules: dict[str, list[float | None]]
    ) -> Evaluation:
        """Quality, and the paired change since before training with its 95 % interval."""
        details: dict[str, Any] = {"prompts": len(self.prompts)}
        for name, values in {**scores, **{f"rule/{name}": values for name, values in rules.items()}}.items():
            details[name] = interval(values)
            since = change(values, self.before[name]) if name in self.before else None
            if since is not None:
                details[f"{name}_change"] = since
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
        if "reference" in roles and not self.judging.greedy:
            found = found.adding(ref_logp=roles.reference.logprobs(rollout))
        return found.gather()

    def judge(self, source: RuleSource, rollout: Rollout) -> Scores:
        """One rule's scores of all answers."""
        if not self.judging.skip:
            values_B, errors = source.score(rollout), None
        else:
            values_B, errors = source.attempt(rollout)
        return Scores(values_B[:, None], values_B, (source.name,), (1.0,), errors)

    def per_prompt(self, rollout: Rollout, values: list[float | None]) -> list[float | None]:
        """The mean of the known values of each prompt's answers, in the order of the prompts."""
        return [mean_or_none([values[i] for i in rows]) for rows in self.answers_of(rollout.group)]

    def answers_of(self, group_B: Tensor) -> list[list[int]]:
        """P lists of the rows that answer each prompt."""
        found: list[list[int]] = [[] for _ in range(len(self.prompts))]
        for row, prompt in enumerate(group_B.tolist()):
            found[prompt].append(row)
        return found

    def passes(self, rollout: Rollout, judged: Mapping[str, Scores]) -> dict[str, float]:
        """pass@k of every rule, over the prompts of which k answers or more have a score."""
        out = {}
        for name, found in judged.items():
            right, valid = (found.total >= 1.0).tolist(), found.valid.tolist()
            for k in self.judging.pass_at:
                chances: list[float | None] = []
                for rows in self.answers_of(rollout.group):
                    known = [right[i] for i in rows if valid[i]]
                    chances.append(pass_at_k(len(known), sum(known), k) if len(known) >= k else None)
                out[f"eval/pass_at_{k}/{name}"] = mean_of(chances)
        return out

    def record(
        self, to: UnscoredResponses, step: int, phase: str, rollout: Rollout, judged: Mapping[str, Scores]
    ) -> int:
        """How many answers the reward or a rule could not score; they are written down."""
        assert rollout.score is not None
        bad_B = ~rollout.score.valid
        label = phase if phase != "step" else "evaluation"
        to.roles.reward.take_errors().gather()  # of these same answers
        records = unscored(rollout, rollout.score)
        for found in judged.values():
            bad_B |= ~found.valid
            records += unscored(rollout, found)
        to.write(step, label, records)
        return int(bad_B.sum())

    def rows(self, rollout: Rollout, phase: str, judged: Mapping[str, Scores]) -> list[dict[str, Any]]:
        """One sample a row, as the report reads them."""
        rewarded, trained = rollout.rewarded(), rollout.sequences.trained.rows()
        ref_rows = rollout.ref_logp.rows() if rollout.ref_logp is not None else None
        return [
            {
                "id": rollout.prompt_ids[i],
                "phase": phase,
                "prompt": prompt_text(rollout.messages[i]),
                "response": rollout.texts[i],
                "proxy": number_or_none(rewarded[i]),
                "gold": self.gold_of(rollout, i),
                "length": int(trained[i].sum()),
                "finished": bool(rollout.finished[i]),
                "ref_logp_per_token": None if ref_rows is None else number_or_none(ref_rows[i][trained[i]].mean()),
                **{f"rule/{name}": number_or_none(found.total[i]) for name, found in judged.items()},
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


def number_or_none(value: Tensor) -> float | None:
    """None where there is no score."""
    return float(value) if bool(value.isfinite()) else None


def mean_or_none(values: list[float | None]) -> float | None:
    mean = mean_of(values)
    return None if math.isnan(mean) else mean


def first_prompts(prompts: Prompts, count: int) -> Prompts:
    """The first `count` prompts in the order of their ids, which are hashes: a fixed sample of the held-out set."""
    order = sorted(range(len(prompts)), key=lambda i: prompts.ids[i])
    return prompts.select(order[:count])
