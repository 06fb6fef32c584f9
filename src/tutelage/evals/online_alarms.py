"""What a run that learns from fresh preferences warns about, each alarm with what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tutelage.alarms import Alarm
from tutelage.config.online_dpo import PreferenceConfig


@dataclass
class PreferenceAlarms:
    """Each rings when its condition begins to hold, and again only after it has cleared.

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
        length = metrics["rollout/length_mean"]
        if self.first_length is None:
            self.first_length = length
        watched = (self._kl(metrics["kl/sequence"]), self._length(length, self.first_length), self._ties(metrics))
        found = [alarm for alarm in watched if alarm is not None]
        new = [alarm for alarm in found if alarm.kind not in self.ringing]
        self.ringing = {alarm.kind for alarm in found}
        return new

    def _kl(self, kl: float) -> Alarm | None:
        bound, name = self.cfg.alarms.kl, self.cfg.algorithm
        if kl <= bound:
            return None
        text = f"sequence KL is {kl:.2f} nats (alarm at {bound:g}): the policy is far from the reference. "
        return Alarm("kl", f"{text}Raise {name}.beta, or lower optim.lr")

    def _length(self, length: float, start: float) -> Alarm | None:
        name = self.cfg.algorithm
        if length <= self.cfg.alarms.length_ratio * start:
            return None
        text = f"mean length is {length:.0f} tokens, {length / start:.1f} times its start ({start:.0f}). "
        return Alarm(
            "length_explosion", f"{text}Set {name}.missing_eos_penalty, or look for a reward that pays for length"
        )

    def _ties(self, metrics: Mapping[str, float]) -> Alarm | None:
        tied, bound = metrics["preference/tied_fraction"], self.cfg.alarms.tied_fraction
        if not tied > bound:  # NaN where no pair has scores
            return None
        text = f"{tied:.0%} of the pairs have equal scores (alarm at {bound:.0%}) and teach nothing. "
        return Alarm("ties", f"{text}Raise rollout.temperature or samples, or use a reward with finer steps")
