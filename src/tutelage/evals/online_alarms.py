"""What a run that learns from fresh preferences warns about, each alarm with what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tutelage.alarms import LONGER_FOR_REWARD, Alarm, kl_alarm, length_alarm
from tutelage.config.online_dpo import PreferenceConfig


@dataclass
class PreferenceAlarms:
    """Each rings when its condition begins to hold, and again only after it has cleared; none on a metric that an
    algorithm of the user's own does not report.

    The first step's length is what later steps are compared with; it is part of the checkpoint (`state`).
    """

    cfg: PreferenceConfig
    first_length: float | None = None
    ringing: set[str] = field(default_factory=set)

    def state(self) -> dict[str, object]:
        return {"first_length": self.first_length, "ringing": sorted(self.ringing)}

    def load_state(self, saved: Mapping[str, object]) -> None:
        self.first_length = saved["first_length"]  # type: ignore[assignment]
        self.ringing = set(saved["ringing"])  # type: ignore[call-overload]

    def check(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms that begin to ring at this step's metrics."""
        length = metrics.get("rollout/length_mean", math.nan)
        if self.first_length is None and math.isfinite(length):
            self.first_length = length
        first = math.nan if self.first_length is None else self.first_length
        bounds, name = self.cfg.alarms, self.cfg.algorithm
        watched = (
            kl_alarm(metrics.get("kl/sequence", math.nan), bounds.kl, f"Raise {name}.beta, or lower optim.lr"),
            length_alarm(length, first, bounds.length_ratio, LONGER_FOR_REWARD.format(name=name)),
            self._ties(metrics),
            self._unscored(metrics),
        )
        found = [alarm for alarm in watched if alarm is not None]
        new = [alarm for alarm in found if alarm.kind not in self.ringing]
        self.ringing = {alarm.kind for alarm in found}
        return new

    def _ties(self, metrics: Mapping[str, float]) -> Alarm | None:
        tied, bound = metrics.get("preference/tied_fraction", math.nan), self.cfg.alarms.tied_fraction
        if not tied > bound:  # NaN where no pair has scores
            return None
        text = f"{tied:.0%} of the pairs have equal scores (alarm at {bound:.0%}) and teach nothing. "
        return Alarm("ties", f"{text}Raise rollout.temperature or samples, or use a reward with finer steps")

    def _unscored(self, metrics: Mapping[str, float]) -> Alarm | None:
        """Pairs are there, and none of them has two scores."""
        pairs = metrics.get("preference/unscored", 0.0)
        if not pairs or not math.isnan(metrics.get("preference/tied_fraction", math.nan)):
            return None
        return Alarm(
            "unscored",
            f"none of the {pairs:.0f} pairs of this step has two scores, so nothing is learned. Read the reasons in "
            "samples/errors.jsonl; correct the rule or the environment, or raise its seconds",
        )
