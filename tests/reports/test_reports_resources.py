"""Time and memory as tables: cells by hand, the same in plain lines, in a terminal and on the page."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tutelage.reports import html
from tutelage.reports.display import PlainDisplay, summary_rows
from tutelage.reports.html import write_report
from tutelage.reports.resources import (
    MOST_PROCESSES,
    megabytes,
    resource_tables,
    seconds_text,
    without_resources,
)
from tutelage.reports.rich_display import RichDisplay
from tutelage.reports.run_folder import RunFolder


def process(peak: int, before: int = 500, kind: str = "reset", during: str = "actor.step") -> dict[str, Any]:
    return {"kind": kind, "before": before * 10**6, "peak": peak * 10**6, "during": during, "between": 610 * 10**6}


def call(role: str, name: str, seconds: float, share: float, **more: Any) -> dict[str, Any]:
    base = {"calls": 4, "tokens": 0, "peak_bytes": 700_000_000, "where": "controller"}
    return {"role": role, "call": name, "seconds": seconds, "share": share, **base, **more}


CALLS = [
    call("actor", "generate", 60.0, 0.6, tokens=120_000, peak_bytes=1_234_000_000),
    call("actor", "step", 30.0, 0.3, calls=1200),
    call("actor", "publish", 0.04, 0.0004, peak_bytes=55_400_000),
    call("reward", "cut_inputs", 0.01, 0.0001, calls=1, peak_bytes=1_000_000),
]
HELD = {
    "actor": {"weights": 540_000_000, "gradients": 0, "moments": 1_080_000_000, "shared": 0, "owners": []},
    "reference": {"weights": 0, "gradients": 0, "moments": 0, "shared": 540_000_000, "owners": ["actor"]},
    "rules": {"weights": 0, "gradients": 0, "moments": 0, "shared": 0, "owners": []},
}
LOCAL = {
    "seconds": 100.0,
    "other_seconds": 9.95,
    "calls": CALLS,
    "held": HELD,
    "processes": {"controller": process(1300)},
}
SUMMARY = {"steps": 4, "resources": LOCAL}


def test_the_table_of_one_process_by_hand() -> None:
    calls, held = resource_tables(SUMMARY)
    assert calls.head == ("role", "call", "calls", "seconds", "share", "tokens/s", "peak MB")
    assert calls.rows == (
        ("actor", "generate", "4", "60.00", "60.0%", "2,000", "1,234"),
        ("actor", "step", "1,200", "30.00", "30.0%", "", "700"),
        ("short calls", "2 kinds", "5", "0.05", "0.1%", "", "55.4"),
        ("other (controller, data)", "", "", "9.95", "9.9%", "", "610"),
        ("total", "", "", "100", "100.0%", "", ""),
    )
    assert calls.notes[0].startswith("peak: the largest resident size of the process during a call (VmHWM")
    assert calls.notes[1] == (
        "process controller: 1,300 MB resident at most (actor.step), 800 MB above its size before the roles were built"
    )
    assert held.rows == (
        ("actor", "540", "0.0", "1,080", "0.0", ""),
        ("reference", "0.0", "0.0", "0.0", "540", "actor"),
    )


def test_time_that_nobody_counted_is_not_called_other() -> None:
    (table, *_) = resource_tables({"resources": {**LOCAL, "uncounted_seconds": LOCAL["seconds"] / 4}})
    assert table.rows[-2][:1] == ("not counted (before the resume)",)
    assert table.rows[-2][4] == "25.0%"


def test_with_ranks_elsewhere_the_table_says_which_one() -> None:
    processes = {f"main {rank}": process(900 + rank) for rank in range(12)}
    calls = [call("actor", "generate", 80.0, 0.8, where="main 1"), call("critic", "step", 40.0, 0.4, where="main 0")]
    found = {**LOCAL, "other_seconds": None, "calls": calls, "processes": processes, "held": {}}
    (table,) = resource_tables({"resources": found})
    assert table.head[-1] == "on"
    assert [row[-1] for row in table.rows] == ["main 1", "main 0", ""]
    assert table.rows[-1] == ("total", "", "", "100", "", "", "", "")
    assert table.notes[0].startswith("calls overlap")
    told = [note for note in table.notes if note.startswith("process")]
    assert len(told) == MOST_PROCESSES
    assert told[0].startswith("process main 11: 911 MB")
    assert table.notes[-1] == "4 more processes are in summary.json"


@pytest.mark.parametrize(
    ("kind", "words"), [("cuda", "CUDA allocator"), ("sampled", "every 10 ms"), ("run-wide", "all calls before it")]
)
def test_every_kind_of_peak_is_told_apart(kind: str, words: str) -> None:
    table, _ = resource_tables({"resources": {**LOCAL, "processes": {"controller": process(1, kind=kind)}}})
    assert words in table.notes[0]


def test_a_summary_without_a_measurement_has_no_table() -> None:
    for summary in ({}, {"steps": 3}, {"resources": {}}, {"resources": "gone"}, {"resources": {"calls": []}}):
        assert resource_tables(summary) == []
    assert without_resources(SUMMARY) == {"steps": 4}
    assert summary_rows(without_resources(SUMMARY)) == [("steps", "4")]


def test_lines_are_aligned() -> None:
    title, head, *rest = resource_tables(SUMMARY)[0].lines()
    assert title == "time and peak memory"
    rows = rest[:5]
    end = head.index("seconds") + len("seconds")
    assert [row[:end].split()[-1] for row in rows] == ["60.00", "30.00", "0.05", "9.95", "100"]
    assert [row[end : end + 1] for row in rows] == [" "] * 5


def test_plain_lines_and_terminal_show_the_same_cells_after_the_summary() -> None:
    plain, live = io.StringIO(), io.StringIO()
    PlainDisplay(4, "demo", stream=plain).finish(SUMMARY)
    console = Console(file=live, force_terminal=True, width=140, color_system=None, legacy_windows=False)
    RichDisplay(4, "demo", console=console).finish(SUMMARY)
    for shown in (plain.getvalue(), live.getvalue()):
        assert shown.index("steps") < shown.index("time and peak memory") < shown.index("held by the roles")
        for cell in ("generate", "60.00", "1,234", "other (controller, data)", "1,080", "800 MB above"):
            assert cell in shown
        assert "resources." not in shown


def test_the_page_has_both_tables_once_and_escapes_them(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stand_in(run: RunFolder) -> Path:
        path = run.path / "stand_in.png"
        path.write_bytes(b"picture")
        return path

    monkeypatch.setattr(html, "curves_of", stand_in)
    monkeypatch.setattr(html, "comparison_of", stand_in)
    folder = make_run()
    assert 'id="resources"' not in write_report(folder).read_text()
    hostile = [*CALLS, call("<script>x</script>", "step", 1.0, 0.01)]
    (folder / "summary.json").write_text(json.dumps({"steps": 4, "resources": {**LOCAL, "calls": hostile}}))
    page = write_report(folder).read_text()
    assert page.count('<section id="resources">') == 1
    assert '<a href="#resources">' in page
    assert '<td class="number">1,234</td>' in page
    assert '<td class="name">other (controller, data)</td>' in page
    assert "<script>x" not in page
    assert "resources.calls" not in page


def test_sizes_and_seconds_are_short() -> None:
    assert [megabytes(n) for n in (0, 55_449_999, 99_940_000, 1_234_567_890)] == ["0.0", "55.4", "99.9", "1,235"]
    assert [seconds_text(s) for s in (0.004, 99.994, 1234.4)] == ["0.00", "99.99", "1,234"]
