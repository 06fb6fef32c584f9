"""The numbers a reader wants first: before and after with intervals, KL, and what they say together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutelage.math.stats import mean_interval, paired_interval, wilson_interval
from tutelage.reports.panels import series
from tutelage.reports.run_folder import RunFolder
from tutelage.reports.samples import Sample, pair_samples


@dataclass(frozen=True)
class Headline:
    """One row: name, unit, before, after, change; texts ready to show, empty where there is nothing to say."""

    name: str
    unit: str
    before: str
    after: str
    change: str = ""


@dataclass(frozen=True)
class Verdict:
    """tone: good, neutral or warning."""

    tone: str
    text: str


def plain_number(value: float, sign: bool = False) -> str:
    """Three or four significant digits, a true minus sign; never an exponent between 0.001 and a million."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e6:
        digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 or size == 0 else 3
        text = f"{value:+,.{digits}f}" if sign else f"{value:,.{digits}f}"
    else:
        text = f"{value:+.2e}" if sign else f"{value:.2e}"
    return text.replace("-", "−")


def interval_text(interval: tuple[float, float, float], sign: bool = False) -> str:
    mean, low, high = interval
    if not math.isfinite(low):
        return f"{plain_number(mean, sign)} (one value, no interval)"
    return f"{plain_number(mean, sign)} [{plain_number(low, sign)}, {plain_number(high, sign)}]"


def rate_text(successes: int, count: int) -> str:
    rate, low, high = wilson_interval(successes, count)
    return f"{rate:.1%} [{low:.1%}, {high:.1%}]"


Pairs = Sequence[tuple[Sample, Sample]]


def _paired(name: str, unit: str, pairs: Pairs, value: Callable[[Sample], float | None]) -> Headline | None:
    known = [(b, a) for b, a in ((value(first), value(second)) for first, second in pairs) if None not in (b, a)]
    if not known:
        return None
    before = [float(b) for b, _ in known if b is not None]
    after = [float(a) for _, a in known if a is not None]
    change = interval_text(paired_interval(after, before), sign=True)
    return Headline(name, unit, interval_text(mean_interval(before)), interval_text(mean_interval(after)), change)


def _from_samples(pairs: Pairs) -> list[Headline]:
    rows = [
        _paired("Proxy reward", "reward", pairs, lambda s: s.proxy),
        _paired("Gold reward", "gold score", pairs, lambda s: s.gold),
        _paired("Response length", "tokens", pairs, lambda s: float(s.length)),
        _paired("Reference likelihood", "nats per token", pairs, lambda s: s.ref_logp_per_token),
    ]
    found = [row for row in rows if row is not None]
    if pairs:
        ended = [sum(side[i].finished for side in pairs) for i in (0, 1)]
        shares = [rate_text(count, len(pairs)) for count in ended]
        found.append(Headline("Answers that end by themselves", "", *shares))
    return found


METRIC_ROWS = (
    ("kl/sequence", "KL to the reference, rollouts", "nats per sequence"),
    ("eval/kl_sequence", "KL to the reference, held out", "nats per sequence"),
    ("policy/entropy", "Policy entropy", "nats per token"),
    ("value/explained_variance", "Critic, explained variance", "share of the returns' variance"),
    ("sft/loss", "Training loss", "nats per token"),
    ("rm/loss", "Training loss", "nats per pair"),
    ("rm/accuracy", "Training accuracy", "share of pairs"),
    ("dpo/loss", "Training loss", "per pair"),
    ("dpo/accuracy", "Training accuracy", "share of pairs"),
    ("dpo/margin", "Reward margin", "beta times nats"),
    ("eval/loss", "Held-out loss", "nats"),
    ("eval/accuracy", "Held-out accuracy", "share of pairs"),
)


def headlines(run: RunFolder) -> list[Headline]:
    """Samples first (paired, with 95 % intervals), then the first and the last value of the metrics that are there."""
    rows = _from_samples(pair_samples(run.before, run.after)[0])
    for metric, name, unit in METRIC_ROWS:
        steps, values = series(run.metrics, metric)
        if values:
            change = plain_number(values[-1] - values[0], sign=True) if len(values) > 1 else ""
            rows.append(
                Headline(
                    name,
                    unit,
                    f"{plain_number(values[0])} (step {steps[0]})",
                    f"{plain_number(values[-1])} (step {steps[-1]})",
                    change,
                )
            )
    return rows


def _direction(interval: tuple[float, float, float]) -> int:
    """1: rose, -1: fell, 0: the interval holds 0."""
    return (interval[1] > 0) - (interval[2] < 0)


def verdict(run: RunFolder) -> Verdict | None:
    """What the paired changes of proxy and gold say together; None without samples before and after."""
    pairs, _ = pair_samples(run.before, run.after)
    if not pairs:
        return None
    proxy = _direction(paired_interval([a.proxy for _, a in pairs], [b.proxy for b, _ in pairs]))
    moved = {1: "rose", -1: "fell", 0: "did not change by more than its 95 % interval"}
    gold_pairs = [(b.gold, a.gold) for b, a in pairs if b.gold is not None and a.gold is not None]
    if not gold_pairs:
        return Verdict(
            "warning" if proxy < 0 else "neutral",
            f"The proxy reward {moved[proxy]} on the same prompts. This run has no gold score, so that nothing here "
            "says whether the answers became better or only better rewarded; read the samples.",
        )
    gold = _direction(paired_interval([a for _, a in gold_pairs], [b for b, _ in gold_pairs]))
    if proxy > 0 > gold:
        return Verdict(
            "warning",
            "The proxy reward rose while the gold reward fell on the same prompts: the policy exploits the reward "
            "model. Use an earlier checkpoint, raise kl.coef, set kl.budget, or train the reward model on the new "
            "answers.",
        )
    tone = "good" if proxy > 0 and gold > 0 else "warning" if gold < 0 or proxy < 0 else "neutral"
    return Verdict(tone, f"On the same prompts the proxy reward {moved[proxy]} and the gold reward {moved[gold]}.")
