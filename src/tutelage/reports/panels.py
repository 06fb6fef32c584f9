"""What the training-curves figure shows for each kind of run: panels as data, no drawing.

A panel lists curves by metric name (docs/metrics.md); a curve the run has no number of, and a panel without curves, are
left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tutelage.reports.run_folder import setting_of

# Okabe and Ito's colour-blind-safe palette; those of it that are dark enough for text on white.
TRAIN = "#0072B2"
HELD_OUT = "#D55E00"
GOLD = "#00795A"
OTHER = "#7A4B8C"
COLOURS = (TRAIN, HELD_OUT, GOLD, OTHER)
COLUMNS = 3


@dataclass(frozen=True)
class Curve:
    """One metric over steps. `held_out` curves are sparse: drawn with a point at every evaluation."""

    metric: str
    label: str
    colour: str = TRAIN
    held_out: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line. One that is not `always` shown appears when the data comes within half of it."""

    value: float
    label: str
    always: bool = True


@dataclass(frozen=True)
class Panel:
    """kind: number, percent (of shares in 0..1), or wide (a log axis when positive values span over two decades)."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    levels: tuple[Level, ...] = ()
    kind: str = "number"


def _level(config: Mapping[str, Any], key: str, label: str, *, always: bool = True) -> tuple[Level, ...]:
    value = setting_of(config, key)
    return (Level(float(value), label.format(value=f"{float(value):g}"), always),) if value is not None else ()


def _ppo(config: Mapping[str, Any], has: set[str]) -> tuple[list[Panel], list[Panel]]:
    value = "value/error" if "value/error" in has else "value/loss"  # without the weight vf_coef where it is known
    adaptive = setting_of(config, "kl.controller") == "adaptive"
    levels = _level(config, "kl.budget", "budget {value}")
    levels += _level(config, "kl.target", "target {value}") if adaptive else ()
    levels += _level(config, "alarms.kl", "alarm {value}", always=False)
    clip_alarm = setting_of(config, "alarms.clip_fraction")
    clip_levels = () if clip_alarm is None else (Level(float(clip_alarm), f"alarm {float(clip_alarm):.0%}", False),)
    limit = _level(config, "rollout.max_new_tokens", "limit {value}", always=False)
    required = [
        Panel(
            "Reward (proxy)",
            "reward",
            (
                Curve("reward/score_mean", "rollouts"),
                Curve("eval/proxy_mean", "held out", HELD_OUT, held_out=True),
            ),
        ),
        Panel("Reward (gold)", "gold score", (Curve("eval/gold_mean", "held out", GOLD, held_out=True),)),
        Panel(
            "KL to the reference",
            "nats per sequence",
            (Curve("kl/sequence", "rollouts"), Curve("eval/kl_sequence", "held out", HELD_OUT, held_out=True)),
            levels,
        ),
        Panel("Policy entropy", "nats per token", (Curve("policy/entropy", "entropy"),)),
        Panel(
            "Clip fraction",
            "share of response tokens",
            (Curve("policy/clip_fraction", "policy"),),
            clip_levels,
            "percent",
        ),
        Panel("Value loss", "squared reward", (Curve(value, "value loss"),), kind="wide"),
        Panel(
            "Response length",
            "tokens, mean",
            (Curve("rollout/length_mean", "mean"),),
            limit,
        ),
    ]
    extra = [
        Panel("Explained variance", "share of the returns' variance", (Curve("value/explained_variance", "critic"),)),
        Panel(
            "Gradient norm",
            "before clipping",
            (Curve("policy/grad_norm", "actor"), Curve("value/grad_norm", "critic", OTHER)),
            kind="wide",
        ),
    ]
    return required, extra


def _supervised(prefix: str, has: set[str]) -> list[Panel]:
    """Gradient norm and learning rate under whatever prefix this stage logs them."""

    def named(suffix: str) -> tuple[Curve, ...]:
        names = [name for name in sorted(has) if name.endswith(suffix)]
        return tuple(
            Curve(name, name.removesuffix(suffix), COLOURS[i % len(COLOURS)]) for i, name in enumerate(names[:4])
        )

    return [
        Panel("Gradient norm", "before clipping", named("/grad_norm"), kind="wide"),
        Panel("Learning rate", "learning rate", named("/lr")),
        Panel("Speed", "tokens per second", (Curve("time/tokens_per_s", prefix),)),
    ]


def _sft(has: set[str]) -> list[Panel]:
    return [
        Panel(
            "Loss",
            "nats per token",
            (Curve("sft/loss", "train"), Curve("eval/loss", "held out", HELD_OUT, held_out=True)),
        ),
        *_supervised("sft", has),
    ]


def _reward_model(has: set[str]) -> list[Panel]:
    return [
        Panel(
            "Loss",
            "nats per pair",
            (Curve("rm/loss", "train"), Curve("eval/loss", "held out", HELD_OUT, held_out=True)),
            (Level(math.log(2), "chance 0.69"),),
        ),
        Panel(
            "Accuracy",
            "share of pairs ranked right",
            (Curve("rm/accuracy", "train"), Curve("eval/accuracy", "held out", HELD_OUT, held_out=True)),
            (Level(0.5, "chance 50%"),),
            "percent",
        ),
        Panel(
            "Margin",
            "chosen − rejected, reward",
            (Curve("rm/margin", "train"), Curve("eval/margin", "held out", HELD_OUT, held_out=True)),
        ),
        *_supervised("rm", has),
    ]


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, NaN and infinities included; a step logged twice keeps its last value."""
    found: dict[int, float] = {}
    for record in metrics:
        value = record.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[int(record.get("step", 0))] = float(value)
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def metric_names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every metric that has a number in some record, in the order of first appearance, without step and time."""
    names = {name: None for record in metrics for name, v in record.items() if isinstance(v, (int, float))}
    return [name for name in names if name not in ("step", "time")]


def panels_for(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Panel]:
    """The panels of a run, from what it logged. A run of an unknown kind gets one panel a metric, nine at most."""
    names = metric_names(metrics)
    has = set(names)
    extra: list[Panel] = []
    if "reward/score_mean" in has:
        panels, extra = _ppo(config, has)
    elif "rm/loss" in has:
        panels = _reward_model(has)
    elif "sft/loss" in has:
        panels = _sft(has)
    else:
        panels = [Panel(name, "", (Curve(name, name),)) for name in names[: COLUMNS * COLUMNS]]

    def present(chosen: Sequence[Panel]) -> list[Panel]:
        kept = [replace(p, curves=tuple(c for c in p.curves if c.metric in has)) for p in chosen]
        return [panel for panel in kept if panel.curves]

    shown = present(panels)
    for panel in present(extra):
        if len(shown) % COLUMNS == 0:
            break
        shown.append(panel)
    return shown
