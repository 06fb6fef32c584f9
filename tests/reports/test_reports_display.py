from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from typing import TextIO

import pytest
from rich.console import Console

from tutelage.errors import ConfigError
from tutelage.reports.display import (
    Display,
    JsonDisplay,
    Pace,
    PlainDisplay,
    compact,
    duration,
    make_display,
    shown_metrics,
    summary_rows,
)
from tutelage.reports.rich_display import RichDisplay

METRICS = {"reward/score_mean": 1.25, "kl/sequence": 3.5, "time/step_s": 2.0, "eval/kl_sequence": 4.0}
SUMMARY = {
    "steps": 3,
    "stopped": None,
    "before": {"eval/proxy_mean": 0.5, "proxy": {"mean": 0.5, "low": 0.25, "high": 0.75}, "eval/loss": 2.0},
    "after": {
        "eval/proxy_mean": 1.5,
        "proxy": {"mean": 1.5, "low": 1.25, "high": 1.75},
        "eval/loss": 1.0,
        "proxy_change": {"mean": 1.0, "low": 0.5, "high": 1.5},
    },
    "centred": {"shift": 0.125},
}


class Clock:
    """Time that only moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_through(display: Display) -> None:
    display.start()
    display.event("data", "64 rows")
    display.step(0, {"eval/proxy_mean": 0.5})
    for step in range(1, 4):
        display.phase("rollout", 0, 8)
        display.phase("rollout", 8, 8)
        display.step(step, METRICS)
    display.event("kl", "sequence KL is 12 nats [bold]now[/bold]")
    display.close()
    display.finish(SUMMARY)
    display.close()


def terminal(stream: TextIO, width: int = 100) -> Console:
    return Console(file=stream, force_terminal=True, width=width, color_system=None, legacy_windows=False)


def test_every_display_runs_without_a_terminal() -> None:
    for kind in ("auto", "rich", "plain", "json"):
        stream = io.StringIO()
        run_through(make_display(kind, 3, "demo", stream=stream))
        assert "12 nats" in stream.getvalue()


def test_auto_is_plain_without_a_terminal_and_live_in_one() -> None:
    assert isinstance(make_display("auto", 3, "demo", stream=io.StringIO()), PlainDisplay)
    if not hasattr(os, "openpty"):
        pytest.skip("this system has no pseudo-terminals")
    master, slave = os.openpty()
    try:
        with open(slave, "w", closefd=False) as stream:
            env_term = os.environ.get("TERM")
            os.environ["TERM"] = "xterm"
            try:
                assert isinstance(make_display("auto", 3, "demo", stream=stream), RichDisplay)
            finally:
                os.environ.pop("TERM") if env_term is None else os.environ.__setitem__("TERM", env_term)
    finally:
        os.close(master)
        os.close(slave)


def test_an_unknown_kind_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="Did you mean plain"):
        make_display("plane", 3, "demo")


def test_plain_prints_one_line_a_step() -> None:
    stream = io.StringIO()
    run_through(PlainDisplay(3, "demo", stream=stream))
    lines = stream.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 4
    assert steps[1].startswith("step 1/3  reward 1.25  KL (nats/seq) 3.5  held-out KL 4")
    assert "data: 64 rows" in lines
    assert "! kl: sequence KL is 12 nats [bold]now[/bold]" in lines


def test_plain_per_seconds_prints_the_first_the_due_and_the_last() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(10, "demo", every_s=30.0, stream=stream, clock=clock)
    display.start()
    for step in range(1, 11):
        clock.now += 10.0
        display.step(step, METRICS)
    printed = [line.split()[1] for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert printed == ["1/10", "4/10", "7/10", "10/10"]


def test_plain_shows_a_long_phase_and_not_a_short_one() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(2, "demo", stream=stream, clock=clock)
    for done in range(7):
        display.phase("rollout", done, 7)
        clock.now += 4.0
    display.phase("rollout", 7, 7)
    # shown once 10 s have passed since the start (after 12 s), and then every 10 s (after 24 s)
    assert stream.getvalue().splitlines() == ["  rollout 3/7", "  rollout 6/7"]


def test_time_left_is_from_the_steps_of_this_process() -> None:
    clock = Clock()
    pace = Pace(10, clock)
    assert pace.eta_s() is None
    clock.now += 500.0  # an evaluation before training
    pace.observe(0)
    assert pace.eta_s() is None
    clock.now += 6.0
    pace.observe(1)
    clock.now += 6.0
    pace.observe(2)
    assert pace.eta_s() == 8 * 6.0
    resumed = Pace(10, clock)
    clock.now += 3.0
    resumed.observe(8)
    assert resumed.eta_s() == 2 * 3.0
    assert Pace(0, clock).eta_s() is None


def test_json_lines_are_json_and_say_what_they_are() -> None:
    stream = io.StringIO()
    display = JsonDisplay(3, "demo", stream=stream)
    run_through(display)
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [r["type"] for r in records] == ["start", "event", "step", "step", "step", "step", "event", "summary"]
    assert records[3] == {"type": "step", "step": 1, "total_steps": 3, "metrics": METRICS}
    assert records[-1]["summary"] == SUMMARY
    assert records[1]["kind"] == "data"


def test_json_has_no_literal_nan() -> None:
    stream = io.StringIO()
    JsonDisplay(1, "demo", stream=stream).step(1, {"a": math.nan})
    assert json.loads(stream.getvalue())["metrics"] == {"a": "NaN"}
    assert "NaN," not in stream.getvalue().replace('"NaN"', "")


def test_the_live_display_shows_progress_metrics_phase_and_the_last_alarm() -> None:
    stream, clock = io.StringIO(), Clock()
    display = RichDisplay(10, "demo", console=terminal(stream), clock=clock)
    display.step(1, METRICS)
    clock.now += 5.0
    display.step(2, {"reward/score_mean": 2.5})
    display.phase("rollout", 3, 8)
    display.event("checkpoint", "step_000002")
    display.event("kl", "KL [red]high[/red]")
    with display.console.capture() as capture:
        display.console.print(display)
    shown = capture.get()
    assert "2/10" in shown
    assert "3/8" in shown
    assert "rollout" in shown
    assert "2.5" in shown
    assert "3.5" in shown  # logged at step 1 and still in view
    assert "left 0:00:20" in shown  # 2 steps in 5 s, 8 to go
    assert "! kl: KL [red]high[/red]" in shown  # an alarm stays, and is not read as markup
    assert "checkpoint" not in shown


def test_the_live_display_fits_a_narrow_terminal() -> None:
    stream = io.StringIO()
    display = RichDisplay(10, "demo", console=terminal(stream, width=40))
    display.step(1, {f"m/{i}": float(i) for i in range(8)})
    with display.console.capture() as capture:
        display.console.print(display)
    assert all(len(line) <= 40 for line in capture.get().splitlines())


def test_the_live_display_ends_in_one_summary_table() -> None:
    stream = io.StringIO()
    run_through(RichDisplay(3, "demo", console=terminal(stream)))
    assert stream.getvalue().count("demo: done in") == 1
    assert "0.5 [0.25, 0.75] -> 1.5 [1.25, 1.75]" in stream.getvalue()


def test_summary_rows_by_hand() -> None:
    assert summary_rows(SUMMARY) == [
        ("steps", "3"),
        ("centred.shift", "0.125"),
        ("proxy", "0.5 [0.25, 0.75] -> 1.5 [1.25, 1.75]"),
        ("eval/loss", "2 -> 1"),
        ("proxy_change", "1 [0.5, 1.5]"),
    ]


def test_numbers_are_short() -> None:
    assert [compact(v) for v in (3, 3.0, 1234567, 0.000123456, 12345.678, math.nan, True, "x")] == [
        "3",
        "3",
        "1,234,567",
        "0.0001235",
        "12,346",
        "nan",
        "True",
        "x",
    ]
    assert duration(3725.4) == "1:02:05"
    assert [name for name, _ in shown_metrics({"a": 1.0, "b": 2.0})] == ["a", "b"]


def test_a_closed_pipe_and_a_poor_encoding_do_not_stop_a_run() -> None:
    code = (
        "from tutelage.reports.display import PlainDisplay\n"
        "d = PlainDisplay(50, 'demo'); d.start()\n"
        "[d.step(s, {'kl/sequence': 1.0}) for s in range(1, 5000)]\n"
        "d.event('kl', 'caf\\u00e9 \\u2192'); d.finish({}); open(2, 'w').write('lived')"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read().decode().startswith("lived")
    process.stderr.close()
    process.wait()
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainDisplay(1, "demo", stream=ascii_only).event("kl", "café →")


def test_displays_and_logs_load_without_torch_or_matplotlib() -> None:
    code = (
        "import sys, tutelage.reports.display, tutelage.reports.metrics_log, tutelage.reports.hacking\n"
        "import tutelage.reports.run_folder, tutelage.trackers\n"
        "tutelage.reports.display.make_display('rich', 1, 'x').close()\n"
        "assert not {'torch', 'matplotlib', 'wandb', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
