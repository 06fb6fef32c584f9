"""What a run warns about while it can still be saved, each alarm with what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from tutelage.config import GRPOConfig, PolicyGradientConfig, PPOConfig
from tutelage.config.grpo import grouped

HISTORY = 20


@dataclass(frozen=True)
class Alarm:
    """kind: a short name; message: value, bound and what to change; stop: the run ends after this step."""

    kind: str
    message: str
    stop: bool = False


class Watching(Protocol):
    """What watches the metrics of a run; its state is part of the checkpoint."""

    def state(self) -> dict[str, object]: ...
    def load_state(self, saved: Mapping[str, object]) -> None: ...
    def check(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms that begin to ring at this step's metrics."""
        ...


# ---- what several algorithms watch


def unscored_alarm(metrics: Mapping[str, float]) -> Alarm | None:
    """No response of the step has a score, so the step learned nothing from the reward."""
    errors = metrics.get("reward/errors", 0.0)
    if not errors or math.isfinite(metrics.get("reward/score_mean", math.nan)):
        return None
    return Alarm(
        "unscored",
        f"none of the {errors:.0f} responses of this step has a score, so nothing is learned from them. Read the "
        "reasons in samples/errors.jsonl; correct the rule or the environment, or raise its seconds",
    )


def kl_alarm(kl: float, bound: float, advice: str) -> Alarm | None:
    """kl: nats of a whole response.  advice: what to change."""
    if not kl > bound:
        return None
    text = f"sequence KL is {kl:.2f} nats (alarm at {bound:g}): the policy is far from the reference. "
    return Alarm("kl", f"{text}{advice}")


def length_alarm(length: float, start: float, ratio: float, advice: str) -> Alarm | None:
    """length: mean tokens of a response; start: that of the first step.  advice: what to change."""
    if not length > ratio * start:
        return None
    text = f"mean length is {length:.0f} tokens, {length / start:.1f} times its start ({start:.0f}). "
    return Alarm("length_explosion", f"{text}{advice}")


def clip_alarm(clipped: float, bound: float, name: str) -> Alarm | None:
    """clipped: share of the tokens.  name: the section of the algorithm."""
    if not clipped > bound:
        return None
    return Alarm(
        "clip_fraction",
        f"{clipped:.0%} of tokens are clipped (alarm at {bound:.0%}): updates are too large. Lower optim.lr, "
        f"{name}.epochs or {name}.minibatches",
    )


LONGER_FOR_REWARD = "Set {name}.missing_eos_penalty, or look for a reward that pays for length"


@dataclass
class Alarms:
    """Alarms of algorithms that learn from their own rollouts, where they report what an alarm watches.

    Each rings when its condition begins to hold, and again only after it has cleared.

    The first step's entropy and length, and recent value losses, are what later steps are compared with; all of it is
    part of the checkpoint (`state`).
    """

    cfg: PolicyGradientConfig
    first: dict[str, float] = field(default_factory=dict)
    value_errors: list[float] = field(default_factory=list)
    ringing: set[str] = field(default_factory=set)

    def state(self) -> dict[str, object]:
        return {"first": self.first, "value_errors": self.value_errors, "ringing": sorted(self.ringing)}

    def load_state(self, saved: Mapping[str, object]) -> None:
        self.first = dict(saved["first"])  # type: ignore[call-overload]
        self.value_errors = list(saved["value_errors"])  # type: ignore[call-overload]
        self.ringing = set(saved["ringing"])  # type: ignore[call-overload]

    def check(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms that begin to ring at this step's metrics."""
        for name in ("policy/entropy", "rollout/length_mean"):
            if math.isfinite(metrics.get(name, math.nan)):
                self.first.setdefault(name, metrics[name])
        found = [*self._kl(metrics), *self._policy(metrics), *self._nothing(metrics), *self._value(metrics)]
        new = [alarm for alarm in found if alarm.stop or alarm.kind not in self.ringing]
        self.ringing = {alarm.kind for alarm in found}
        return new

    def _kl(self, metrics: Mapping[str, float]) -> list[Alarm]:
        if "kl/sequence" not in metrics:  # no reference, no KL
            return []
        kl, cfg = metrics["kl/sequence"], self.cfg.kl
        advice = "Raise kl.coef, use kl.controller=adaptive, or lower optim.lr"
        out = _rung(kl_alarm(kl, self.cfg.alarms.kl, advice))
        if cfg.budget is not None and kl > cfg.budget:
            action = {
                "warn": "training goes on",
                "lower": f"the learning signal is scaled by {cfg.budget / kl:.2f}",
                "stop": "the run stops here",
            }[cfg.on_budget]
            text = f"sequence KL is {kl:.2f} nats, over kl.budget={cfg.budget:g}: {action}"
            out.append(Alarm("kl_budget", text, stop=cfg.on_budget == "stop"))
        return out

    def _policy(self, metrics: Mapping[str, float]) -> list[Alarm]:
        bounds, name = self.cfg.alarms, self.cfg.algorithm
        out = _rung(clip_alarm(metrics.get("policy/clip_fraction", 0.0), bounds.clip_fraction, name))
        entropy, start = metrics.get("policy/entropy", 0.0), self.first.get("policy/entropy", 0.0)
        if entropy < bounds.entropy_ratio * start:
            out.append(
                Alarm(
                    "entropy_collapse",
                    f"entropy fell to {entropy:.3f} nats per token, under {bounds.entropy_ratio:.0%} of its start "
                    f"({start:.3f}). Raise kl.coef or {name}.entropy_coef, or lower optim.lr",
                )
            )
        length, start = metrics.get("rollout/length_mean", 0.0), self.first.get("rollout/length_mean", 0.0)
        return out + _rung(length_alarm(length, start, bounds.length_ratio, LONGER_FOR_REWARD.format(name=name)))

    def _nothing(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """A step whose responses teach nothing: none has a score, those of a group are alike, or all are left out."""
        out = _rung(unscored_alarm(metrics))
        if not isinstance(self.cfg, GRPOConfig):
            return out
        own = self.cfg.grpo
        alike = metrics.get("reward/group_equal_fraction", 0.0) >= 1.0
        if alike and grouped(own.estimator) and own.estimator != "gdpo":
            more = "raise grpo.max_refills" if own.dynamic_sampling else "set grpo.dynamic_sampling=true"
            out.append(
                Alarm(
                    "equal_groups",
                    "the scores of every group are equal: this step learns nothing from the reward. Take prompts of "
                    "another difficulty, raise rollout.temperature or rollout.samples_per_prompt, or "
                    f"{more}",
                )
            )
        if own.overlong_filtering and metrics.get("rollout/truncated_fraction", 0.0) >= 1.0:
            out.append(
                Alarm(
                    "all_truncated",
                    "the length limit cut every response of this step, and grpo.overlong_filtering leaves them out: "
                    "nothing is learned. Raise rollout.max_new_tokens, or set grpo.overlong_filtering=false",
                )
            )
        return out

    def _value(self, metrics: Mapping[str, float]) -> list[Alarm]:
        if not isinstance(self.cfg, PPOConfig):  # no critic
            return []
        if "value/error" not in metrics:
            return []
        error, past, out = metrics["value/error"], self.value_errors, []
        if len(past) >= 3 and error > self.cfg.alarms.value_loss_ratio * median(past):
            out.append(
                Alarm(
                    "value_loss",
                    f"the value loss is {error:.3g}, {error / median(past):.0f} times its recent median. "
                    "Lower critic.lr, or set ppo.whiten_rewards=true",
                )
            )
        self.value_errors = [*past, error][-HISTORY:]
        return out


def _rung(alarm: Alarm | None) -> list[Alarm]:
    return [] if alarm is None else [alarm]
