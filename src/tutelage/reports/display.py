"""What a person or a program sees while a run goes on: live in a terminal, plain lines elsewhere, JSON on request.

`Display` is the protocol, `make_display` the factory.  A display never stops a run: when the other end of a pipe goes
away it falls silent (metrics.jsonl has everything).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TextIO

from tutelage.errors import ConfigError, closest
from tutelage.reports.metrics_log import to_json
from tutelage.reports.resources import resource_tables, without_resources

Clock = Callable[[], float]
Kind = Literal["auto", "rich", "plain", "json"]
KINDS = ("auto", "rich", "plain", "json")
NOTES = frozenset({"data", "model", "cluster", "checkpoint", "resume", "log", "measurement"})
"""Kinds of events that are information; every other kind is an alarm."""
PHASE_EVERY_S = 10.0

SHOWN: dict[str, str] = {
    "reward/score_mean": "reward",
    "reward/rlhf": "reward - KL",
    "kl/sequence": "KL (nats/seq)",
    "policy/entropy": "entropy",
    "policy/clip_fraction": "clip fraction",
    "value/error": "value loss",
    "rollout/length_mean": "length",
    "sft/loss": "loss",
    "rm/loss": "loss",
    "rm/accuracy": "accuracy",
    "dpo/loss": "loss",
    "dpo/accuracy": "accuracy",
    "dpo/margin": "margin",
    "eval/loss": "held-out loss",
    "eval/accuracy": "held-out accuracy",
    "eval/proxy_mean": "held-out proxy",
    "eval/gold_mean": "held-out gold",
    "eval/kl_sequence": "held-out KL",
    "time/tokens_per_s": "tokens/s",
}
"""Metrics a display shows, in this order, and their short names. A run with none of them shows its first eight."""


class Display(Protocol):
    """Calls, in this order: start; any number of phase, step and event; finish.  close in any case, even twice.

    step    one training step is done; metrics by the names of docs/metrics.md.
    phase   part of a step or of the preparation: `done` of `total` units of `name` (rollout, scoring, data).
    event   a note (`NOTES`), a warning or an alarm; whether it goes to events.jsonl too is up to the caller.
    finish  one summary table, then time and memory of the roles where the summary has them; ends the display.
    """

    def start(self) -> None: ...
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def phase(self, name: str, done: int, total: int) -> None: ...
    def event(self, kind: str, message: str) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Pace:
    """Time left, from the steps this process has done itself (a resumed run starts in the middle)."""

    def __init__(self, total_steps: int, clock: Clock) -> None:
        self.total_steps, self.clock = total_steps, clock
        self.begun = clock()
        self.first: int | None = None
        self.last = 0

    def observe(self, step: int) -> None:
        """`step` is done. Step 0, the evaluation before training, only starts the clock again."""
        if step <= 0:
            self.begun = self.clock()
            return
        if self.first is None:
            self.first = step - 1
        self.last = step

    def eta_s(self) -> float | None:
        """Seconds left; None before the first step and when the total is not known."""
        if self.first is None or self.last <= self.first or self.total_steps <= 0:
            return None
        per_step = (self.clock() - self.begun) / (self.last - self.first)
        return max(0, self.total_steps - self.last) * per_step


def duration(seconds: float) -> str:
    """h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def compact(value: Any) -> str:
    """Four significant digits for floats, whole numbers with thousands separators, anything else as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if math.isfinite(value) and abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def shown_metrics(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(short name, text) of the metrics worth a glance."""
    found = [(short, compact(metrics[name])) for name, short in SHOWN.items() if name in metrics]
    if found:
        return found
    return [(name, compact(value)) for name, value in list(metrics.items())[:8]]


def _is_interval(value: Any) -> bool:
    return isinstance(value, Mapping) and {"mean", "low", "high"} <= value.keys()


def _summary_value(value: Any) -> str:
    """A mean with its interval on one line; other values as `compact` has them."""
    if _is_interval(value):
        return f"{compact(value['mean'])} [{compact(value['low'])}, {compact(value['high'])}]"
    if isinstance(value, Mapping) and value.keys() == {"mean"}:
        return compact(value["mean"])
    return compact(value)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A summary as rows of one table.

    The mappings "before" and "after" become one row a metric, before -> after; a mean that is there with its interval
    is shown once.  Other mappings are spread with dotted names; what is None is left out.
    """
    before, after = (v if isinstance(v, Mapping) else {} for v in (summary.get("before"), summary.get("after")))
    rows = []
    for key, value in summary.items():
        if value is None or (key in ("before", "after") and isinstance(value, Mapping)):
            continue
        if isinstance(value, Mapping) and not _is_interval(value):
            rows += [(f"{key}.{name}", text) for name, text in summary_rows(value)]
        else:
            rows.append((key, _summary_value(value)))
    for name in dict.fromkeys([*before, *after]):
        if name.startswith("eval/") and name.removeprefix("eval/").removesuffix("_mean") in {*before, *after}:
            continue
        sides = [_summary_value(side[name]) for side in (before, after) if name in side]
        rows.append((name, sides[0] if sides[0] == sides[-1] else " -> ".join(sides)))
    return rows


class _Writer:
    """Lines to a stream that may be closed, or unable to hold a character."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.gone = False

    def line(self, text: str) -> None:
        if self.gone:
            return
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        try:
            self.stream.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
            self.stream.flush()
        except (BrokenPipeError, ValueError):
            self.gone = True


def _one_line(text: str) -> str:
    return " ".join(text.split())


class PlainDisplay:
    """One line a step, or one per `every_s` seconds; the first and the last step always.  ASCII of our own making."""

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        every_s: float = 0.0,
        stream: TextIO | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.total_steps, self.title, self.every_s, self.clock = total_steps, title, every_s, clock
        self.out = _Writer(stream or sys.stdout)
        self.pace = Pace(total_steps, clock)
        self.printed: float | None = None
        self.phase_seen: dict[str, float] = {}

    def start(self) -> None:
        self.pace = Pace(self.total_steps, self.clock)
        self.out.line(f"{self.title}: {self.total_steps} steps" if self.total_steps else self.title)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.pace.observe(step)
        self.phase_seen.clear()
        now = self.clock()
        due = self.printed is None or now - self.printed >= self.every_s or step == self.total_steps
        if not due:
            return
        self.printed = now
        width = len(str(self.total_steps))
        of = f"/{self.total_steps}" if self.total_steps else ""
        parts = [f"step {step:>{width}}{of}", *(f"{name} {text}" for name, text in shown_metrics(metrics))]
        eta = self.pace.eta_s()
        if eta is not None:
            parts.append(f"left {duration(eta)}")
        self.out.line("  ".join(parts))

    def phase(self, name: str, done: int, total: int) -> None:
        """A line after `PHASE_EVERY_S` seconds of a phase, and every so many again; short phases print nothing."""
        now = self.clock()
        if now - self.phase_seen.setdefault(name, now) >= PHASE_EVERY_S and done < total:
            self.phase_seen[name] = now
            self.out.line(f"  {name} {done}/{total}")
        elif done >= total:
            self.phase_seen.pop(name, None)

    def event(self, kind: str, message: str) -> None:
        self.out.line(f"{'' if kind in NOTES else '! '}{kind}: {_one_line(message)}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        rows = summary_rows(without_resources(summary))
        width = max((len(key) for key, _ in rows), default=0)
        self.out.line(f"{self.title}: done in {duration(self.clock() - self.pace.begun)}")
        for key, value in rows:
            self.out.line(f"  {key:<{width}}  {value}")
        for table in resource_tables(summary):
            for line in table.lines():
                self.out.line(line)

    def close(self) -> None:
        """Nothing is held open."""


class JsonDisplay:
    """One JSON object a line, for programs: {"type": "start", "step", "event" or "summary", ...}.  Phases are left out.

    A step is {"type": "step", "step": 3, "total_steps": 10, "metrics": {...}}; a float that is not finite is a string.
    """

    def __init__(self, total_steps: int, title: str, *, stream: TextIO | None = None) -> None:
        self.total_steps, self.title = total_steps, title
        self.out = _Writer(stream or sys.stdout)

    def _write(self, record_type: str, **fields: Any) -> None:
        self.out.line(json.dumps(to_json({"type": record_type, **fields}), default=str))

    def start(self) -> None:
        self._write("start", title=self.title, total_steps=self.total_steps)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("step", step=step, total_steps=self.total_steps, metrics=metrics)

    def phase(self, name: str, done: int, total: int) -> None:
        """Not part of the stream."""

    def event(self, kind: str, message: str) -> None:
        self._write("event", kind=kind, message=message)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write("summary", summary=summary)

    def close(self) -> None:
        """Nothing is held open."""


def make_display(
    kind: Kind | str,
    total_steps: int,
    title: str,
    *,
    every_s: float = 0.0,
    stream: TextIO | None = None,
) -> Display:
    """auto is rich in a terminal and plain elsewhere.  `every_s` is for plain; `stream` defaults to standard output.

    Raises ConfigError for an unknown kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"no display is called {kind!r}.{closest(kind, KINDS)}", fix=f"use one of {', '.join(KINDS)}")
    if kind == "json":
        return JsonDisplay(total_steps, title, stream=stream)
    if kind in ("auto", "rich"):
        from rich.console import Console

        from tutelage.reports.rich_display import RichDisplay

        console = Console(file=stream, force_terminal=True if kind == "rich" else None)
        if kind == "rich" or (console.is_terminal and not console.is_dumb_terminal):
            return RichDisplay(total_steps, title, console=console)
    return PlainDisplay(total_steps, title, every_s=every_s, stream=stream)
