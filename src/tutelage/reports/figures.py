"""The two figures of a run: training curves, and the reward of the same prompts before and after training.

`build_*` are pure (data in, matplotlib Figure out); `training_curves` and `reward_comparison` read a run folder and
write a PNG.  No pyplot and no backend: nothing global is touched.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from tutelage.errors import DataError
from tutelage.math.stats import mean_interval, paired_interval
from tutelage.reports.metrics_log import write_bytes
from tutelage.reports.panels import COLUMNS, GOLD, TRAIN, Curve, Level, Panel, panels_for, series
from tutelage.reports.run_folder import RunFolder, load_run
from tutelage.reports.samples import Sample, pair_samples

TRAINING_CURVES = "rlhf_training_curves.png"
REWARD_COMPARISON = "reward_comparison.png"
BEFORE = "#6B6B6B"
FAINT = "#8A8A8A"
DPI = 150
STYLE: Any = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
}


def smoothing_window(points: int) -> int:
    """Odd number of steps the dark line averages: 1 up to 60 points, about a twenty-fifth of the run beyond."""
    return 1 if points <= 60 else (points // 25) | 1


def centred_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the finite values within window // 2 positions on either side; NaN where there are none."""
    half, out = window // 2, []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        out.append(sum(near) / len(near) if near else math.nan)
    return out


def _label_ends(ax: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Each curve's name in its own colour right of the axes, at the height of its last point, moved apart if close."""
    gap = 0.09
    ax.get_ylim()  # applies pending autoscaling, so that transData is the final one
    at = [
        (float(ax.transAxes.inverted().transform(ax.transData.transform((0, y)))[1]), text, colour)
        for y, text, colour in ends
        if math.isfinite(y)
    ]
    at.sort()
    heights: list[float] = []
    for height, _, _ in at:
        heights.append(max(height, heights[-1] + gap) if heights else max(height, 0.0))
    if heights:
        over = max(0.0, heights[-1] - 1.0)
        heights = [h - over for h in heights]
    for height, (_, text, colour) in zip(heights, at, strict=True):
        ax.text(1.02, height, text, color=colour, transform=ax.transAxes, va="center", ha="left")


def _draw_curve(ax: Axes, curve: Curve, steps: list[int], values: list[float], window: int) -> float:
    """Draws one curve; returns its last finite value, NaN if it has none. Not-finite points are marked at the foot."""
    if curve.held_out:
        ax.plot(steps, values, color=curve.colour, marker="o", markersize=4.5, linewidth=1.4)
        smooth = values
    else:
        smooth = centred_mean(values, window)
        if window > 1:
            ax.plot(steps, values, color=curve.colour, alpha=0.28, linewidth=0.9)
        ax.plot(steps, smooth, color=curve.colour, marker="o" if len(steps) == 1 else None)
    bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    if bad:
        ax.plot(bad, [0.02] * len(bad), "x", color="#B00020", transform=ax.get_xaxis_transform(), clip_on=False)
        ax.text(0.02, 0.05, f"× {len(bad)} not finite", color="#B00020", transform=ax.transAxes, fontsize=9)
    finite = [value for value in smooth if math.isfinite(value)]
    return finite[-1] if finite else math.nan


def _draw_levels(ax: Axes, levels: tuple[Level, ...], top: float) -> None:
    for level in levels:
        if level.always or top > 0.5 * level.value:
            ax.axhline(level.value, color=FAINT, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
            ax.annotate(
                level.label,
                (0.0, level.value),
                xycoords=("axes fraction", "data"),
                xytext=(4, 2),
                textcoords="offset points",
                color="#555555",
                fontsize=9,
                zorder=4,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
            )


def _draw_panel(ax: Axes, panel: Panel, metrics: Sequence[Mapping[str, Any]], window: int) -> None:
    ends, top, low = [], -math.inf, math.inf
    for curve in panel.curves:
        steps, values = series(metrics, curve.metric)
        ends.append((_draw_curve(ax, curve, steps, values, window), curve.label, curve.colour))
        finite = [v for v in values if math.isfinite(v)]
        top, low = max([top, *finite]), min([low, *finite])
    _draw_levels(ax, panel.levels, top)
    ax.set_title(panel.title)
    ax.set_ylabel(panel.unit)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if panel.kind == "wide" and 0 < low < top / 100:
        ax.set_yscale("log")
    elif panel.kind == "percent":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    elif panel.title == "Learning rate":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    elif panel.title == "Speed":
        ax.yaxis.set_major_formatter(EngFormatter())
    if panel.kind == "percent" and 0 <= low < top / 2:
        ax.set_ylim(bottom=0)
    ax.margins(x=0.02)
    if len(panel.curves) > 1:
        _label_ends(ax, ends)


def build_training_curves(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any], title: str = "") -> Figure:
    """One axes a panel of `panels_for`, three in a row, titled by the panel. Raises DataError without any metric."""
    panels = panels_for(metrics, config)
    if not panels:
        raise DataError("there are no metrics to draw", fix="run at least one step")
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    points = max(len(series(metrics, c.metric)[0]) for p in panels for c in p.curves)
    window = smoothing_window(points)
    with rc_context(STYLE):
        figure = Figure(
            figsize=(4.0 * columns, 2.75 * rows + 0.5), dpi=DPI, layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.06)
        )
        grid = figure.subplots(rows, columns, squeeze=False)
        for index, ax in enumerate(grid.flat):
            if index >= len(panels):
                ax.remove()
                continue
            _draw_panel(ax, panels[index], metrics, window)
            if index + columns >= len(panels):
                ax.set_xlabel("training step")
        note = f"   (dark line: mean of {window} steps; pale: every step)" if window > 1 else ""
        if title or note:
            figure.suptitle(f"{title}{note}", x=0.01, ha="left", fontsize=11, color="#333333")
    return figure


def shared_bins(values: Sequence[float]) -> np.ndarray:
    """Edges of 10 to 40 equal bins over all values, by Freedman and Diaconis' rule.

    Whole numbers that span at most 40 get a bin each, centred on them; any other constant gets one unit around it.
    """
    low, high = min(values), max(values)
    if high - low <= 40 and all(float(value).is_integer() for value in values):
        return np.arange(low - 0.5, high + 1.0)
    if low == high:
        return np.linspace(low - 0.5, low + 0.5, 9)
    quartiles = np.percentile(values, [25, 75])
    width = 2 * (quartiles[1] - quartiles[0]) / len(values) ** (1 / 3)
    count = 10 if width <= 0 else int(min(40, max(10, math.ceil((high - low) / width))))
    return np.linspace(low, high, count + 1)


def _interval_text(interval: tuple[float, float, float], *, sign: bool = False) -> str:
    mean, low, high = interval
    form = "+.2f" if sign else ".2f"
    return f"{mean:{form}}  [{low:{form}}, {high:{form}}]".replace("-", "−")


def _draw_comparison(ax: Axes, name: str, unit: str, before: list[float], after: list[float], colour: str) -> None:
    """Overlaid histograms; above them each mean with its 95 % interval, and the paired difference."""
    bins = shared_bins([*before, *after])
    counts = [np.histogram(values, bins)[0] for values in (before, after)]
    tallest = max(int(c.max()) for c in counts)
    for values, paint, alpha in ((before, BEFORE, 0.40), (after, colour, 0.45)):
        ax.hist(values, bins=list(bins), color=paint, alpha=alpha)
        ax.hist(values, bins=list(bins), histtype="step", color=paint, linewidth=1.4)
    ax.set_ylim(0, tallest * 1.42)
    span = bins[-1] - bins[0]
    ax.set_xlim(bins[0] - 0.03 * span, bins[-1] + 0.03 * span)
    for height, label, values, paint in ((1.26, "before", before, BEFORE), (1.13, "after", after, colour)):
        interval = mean_interval(values)
        mean, low, high = interval
        y = tallest * height
        if math.isfinite(low):
            ax.plot([low, high], [y, y], color=paint, linewidth=2.2, solid_capstyle="butt")
        ax.plot([mean], [y], "o", color=paint, markersize=6)
        ax.plot([mean, mean], [0, y], color=paint, linewidth=1.0, linestyle=(0, (2, 2)))
        right = mean < (bins[0] + bins[-1]) / 2
        ax.annotate(
            f"{label} {_interval_text(interval)}",
            (high if right and math.isfinite(high) else (low if math.isfinite(low) else mean), y),
            xytext=(8 if right else -8, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            color=paint,
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    change = paired_interval(after, before)
    better = sum(a > b for a, b in zip(after, before, strict=True))
    worse = sum(a < b for a, b in zip(after, before, strict=True))
    equal = len(after) - better - worse
    counts_text = f"{better} of {len(after)} prompts higher, {worse} lower" + (f", {equal} equal" if equal else "")
    ax.set_title(name, fontsize=13, pad=36)
    ax.text(
        0.0,
        1.02,
        f"after − before: {_interval_text(change, sign=True)}\n{counts_text}",
        transform=ax.transAxes,
        color="#333333",
        va="bottom",
        linespacing=1.3,
    )
    ax.set_xlabel(unit)
    ax.set_ylabel("answers")
    ax.set_yticks([tick for tick in MaxNLocator(integer=True, nbins=6).tick_values(0, tallest) if tick <= tallest])


def build_reward_comparison(pairs: Sequence[tuple[Sample, Sample]], left_out: int = 0, title: str = "") -> Figure:
    """Axes titled "Proxy reward" and, when pairs carry gold scores, "Gold reward". Raises DataError without pairs."""
    if not pairs:
        raise DataError(
            "no prompt was answered both before and after training",
            fix="samples/before.jsonl and samples/after.jsonl must share ids",
        )
    gold = [(b.gold, a.gold) for b, a in pairs if b.gold is not None and a.gold is not None]
    with rc_context(STYLE):
        figure = Figure(figsize=(12.0 if gold else 9.0, 5.0), dpi=DPI, layout="constrained")
        axes = figure.subplots(1, 2 if gold else 1, squeeze=False)[0]
        _draw_comparison(
            axes[0], "Proxy reward", "proxy reward", [b.proxy for b, _ in pairs], [a.proxy for _, a in pairs], TRAIN
        )
        if gold:
            _draw_comparison(axes[1], "Gold reward", "gold score", [b for b, _ in gold], [a for _, a in gold], GOLD)
        note = f"{len(pairs)} held-out prompts, the same before and after; brackets: 95 % confidence interval"
        if left_out:
            note += f"; {left_out} answers without a partner are left out"
        figure.suptitle(f"{title}: {note}" if title else note, x=0.01, ha="left", fontsize=11, color="#333333")
    return figure


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _plain(text: str) -> str:
    """Dollar signs as they are, not the start of a formula."""
    return text.replace("$", r"\$")


def curves_of(run: RunFolder) -> Path:
    """figures/rlhf_training_curves.png of a loaded run."""
    kind = f" ({run.algorithm})" if run.algorithm else ""
    path = run.path / "figures" / TRAINING_CURVES
    write_bytes(path, png(build_training_curves(run.metrics, run.config, _plain(f"{run.name}{kind}"))))
    return path


def comparison_of(run: RunFolder) -> Path:
    """figures/reward_comparison.png of a loaded run."""
    pairs, left_out = pair_samples(run.before, run.after)
    path = run.path / "figures" / REWARD_COMPARISON
    write_bytes(path, png(build_reward_comparison(pairs, left_out, _plain(run.name))))
    return path


def training_curves(run_folder: Path | str) -> Path:
    """Write figures/rlhf_training_curves.png. Raises DataError without metrics, CheckpointError if it cannot write."""
    return curves_of(load_run(run_folder))


def reward_comparison(run_folder: Path | str) -> Path:
    """Write figures/reward_comparison.png. Raises DataError without samples before and after, CheckpointError."""
    return comparison_of(load_run(run_folder))
