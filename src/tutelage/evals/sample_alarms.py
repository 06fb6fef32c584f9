"""What rejection sampling and distillation warn about, each alarm with what to change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tutelage.alarms import LONGER_FOR_REWARD, Alarm, clip_alarm, kl_alarm, length_alarm, unscored_alarm
from tutelage.config import DistillConfig, RAFTConfig

LEAST_DISTANCE = 0.01
"""Nats a token: a student that is nearer to its teacher is no alarm, however near it began."""


@dataclass
class SampleAlarms:
    """Each rings when its condition begins to hold, and again only after it has cleared; none on a metric that an
    algorithm of the user's own does not report.

    The first step's length, and the first distance from the teacher above 0, are what later steps are compared with;
    they are part of the checkpoint (`state`).
    """

    cfg: RAFTConfig | DistillConfig
    first: dict[str, float] = field(default_factory=dict)
    ringing: set[str] = field(default_factory=set)

    def state(self) -> dict[str, object]:
        return {"first": self.first, "ringing": sorted(self.ringing)}

    def load_state(self, saved: Mapping[str, object]) -> None:
        """What a run without these alarms saved is an empty state."""
        self.first = dict(saved.get("first", {}))  # type: ignore[call-overload]
        self.ringing = set(saved.get("ringing", ()))  # type: ignore[call-overload]

    def check(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Alarms that begin to ring at this step's metrics."""
        for name in ("rollout/length_mean", "teacher/kl_token"):
            if metrics.get(name, math.nan) > 0 and math.isfinite(metrics[name]):
                self.first.setdefault(name, metrics[name])
        cfg = self.cfg
        watched = self._raft(cfg, metrics) if isinstance(cfg, RAFTConfig) else self._distill(cfg, metrics)
        found = [alarm for alarm in (unscored_alarm(metrics), *watched) if alarm is not None]
        new = [alarm for alarm in found if alarm.kind not in self.ringing]
        self.ringing = {alarm.kind for alarm in found}
        return new

    def _length(self, metrics: Mapping[str, float], advice: str) -> Alarm | None:
        length, start = (found.get("rollout/length_mean", math.nan) for found in (metrics, self.first))
        return length_alarm(length, start, self.cfg.alarms.length_ratio, advice)

    def _raft(self, cfg: RAFTConfig, metrics: Mapping[str, float]) -> Iterable[Alarm | None]:
        yield self._length(metrics, LONGER_FOR_REWARD.format(name="raft"))
        if "kl/sequence" in metrics:  # no reference, no KL
            yield kl_alarm(metrics["kl/sequence"], cfg.alarms.kl, "Raise kl.coef, or lower optim.lr")
        if metrics.get("raft/kept_fraction", math.nan) == 0.0:
            mean = metrics.get("raft/score_all", math.nan)
            yield Alarm(
                "nothing_kept",
                f"no response of this step reaches raft.threshold {cfg.raft.threshold:g} (the mean score is "
                f"{mean:.3g}), so nothing is learned. Lower raft.threshold, or use raft.keep=best",
            )

    def _distill(self, cfg: DistillConfig, metrics: Mapping[str, float]) -> Iterable[Alarm | None]:
        yield self._length(metrics, "Lower optim.lr, or take a teacher that ends its answers")
        yield clip_alarm(metrics.get("policy/clip_fraction", 0.0), cfg.alarms.clip_fraction, "distill")
        kl, start, ratio = (
            metrics.get("teacher/kl_token", math.nan),
            self.first.get("teacher/kl_token", 0.0),
            cfg.alarms.teacher_ratio,
        )
        if start > 0 and kl > max(ratio * start, LEAST_DISTANCE):
            yield Alarm(
                "teacher_distance",
                f"the KL from the teacher is {kl:.3g} nats a token, {kl / start:.1f} times its start ({start:.3g}): "
                "the student moves away from the teacher. Lower optim.lr, or take fewer distill.epochs",
            )
