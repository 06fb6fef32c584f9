"""Time and memory of a run as tables, from what summary.json holds of them under `resources`.

A table is texts, ready for a terminal, plain lines or a page.  A byte count is shown in MB (10^6 bytes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESOURCES = "resources"
"""The key of summary.json."""
SHORT = 5e-4
"""Calls that took less than this share of the run are in one line together."""
MOST_PROCESSES = 8
CONTROLLER = "controller"
OTHER = "other (controller, data)"
UNCOUNTED = "not counted (before the resume)"

KINDS = {
    "cuda": "the most that torch's CUDA allocator had given out during a call",
    "reset": "the largest resident size of the process during a call (VmHWM, set back at every call)",
    "sampled": "the largest resident size of the process during a call, read every 10 ms: a shorter peak may be missed",
    "run-wide": "the largest resident size of the process up to the end of the call: this system cannot set it back, "
    "so that a line holds the peaks of all calls before it",
}


@dataclass(frozen=True)
class Table:
    """head and rows have as many cells; the first `names` columns are words, the others numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Aligned text: head, rows, notes."""
        every = [self.head, *self.rows]
        widths = [max(len(row[column]) for row in every) for column in range(len(self.head))]
        return [
            self.title,
            *("  " + self._line(row, widths) for row in every),
            *(f"  {note}" for note in self.notes),
        ]

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = zip(row, widths, range(len(row)), strict=True)
        return "  ".join(f"{t:<{w}}" if column < self.names else f"{t:>{w}}" for t, w, column in cells).rstrip()


def resource_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Time and peak of every call, and what each role holds; nothing where a summary has no measurement."""
    found = summary.get(RESOURCES)
    if not isinstance(found, Mapping) or not found.get("calls"):
        return []
    return [_calls(found), *_held(found)]


def without_resources(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of a summary, for a table of names and values."""
    return {key: value for key, value in summary.items() if key != RESOURCES}


def megabytes(count: float) -> str:
    """MB with thousands separators, one decimal below 100."""
    size = count / 1e6
    return f"{size:,.1f}" if size < 100 else f"{size:,.0f}"


def seconds_text(seconds: float) -> str:
    """Two decimals below 100 s."""
    return f"{seconds:,.2f}" if seconds < 100 else f"{seconds:,.0f}"


def _calls(found: Mapping[str, Any]) -> Table:
    processes: Mapping[str, Any] = found.get("processes", {})
    several = set(processes) - {CONTROLLER}
    total = float(found["seconds"])
    shown = [line for line in found["calls"] if line["share"] >= SHORT]
    short = [line for line in found["calls"] if line["share"] < SHORT]
    rows = [_call_row(line, line["role"], line["call"]) for line in shown]
    if short:
        most = max(short, key=lambda line: line["peak_bytes"])
        together = {
            **{key: sum(line[key] for line in short) for key in ("calls", "seconds", "share")},
            "tokens": 0,
            "peak_bytes": most["peak_bytes"],
            "where": most["where"],
        }
        rows.append(_call_row(together, "short calls", f"{len(short)} kinds"))
    rest, notes = found.get("other_seconds"), []
    if rest is None:
        notes.append("calls overlap: their seconds add up to more than the run")
    else:
        share = rest / total if total > 0 else 0.0
        between = "" if several else megabytes(processes.get(CONTROLLER, {}).get("between", 0))
        rows.append((OTHER, "", "", seconds_text(rest), f"{share:.1%}", "", between, ""))
    if uncounted := float(found.get("uncounted_seconds", 0.0)):
        rows.append((UNCOUNTED, "", "", seconds_text(uncounted), f"{uncounted / total:.1%}", "", "", ""))
    rows.append(("total", "", "", seconds_text(total), "100.0%" if rest is not None else "", "", "", ""))
    head: tuple[str, ...] = ("role", "call", "calls", "seconds", "share", "tokens/s", "peak MB", "on")
    if not several:
        head, rows = head[:-1], [row[:-1] for row in rows]
    notes += [f"peak: {KINDS[kind]}" for kind in dict.fromkeys(p["kind"] for p in processes.values()) if kind in KINDS]
    return Table("time and peak memory", head, tuple(rows), 2, (*notes, *_process_notes(processes)))


def _call_row(line: Mapping[str, Any], role: str, call: str) -> tuple[str, ...]:
    speed = f"{line['tokens'] / line['seconds']:,.0f}" if line["tokens"] and line["seconds"] > 0 else ""
    peak = megabytes(line["peak_bytes"]) if line["peak_bytes"] else ""
    seconds, share = seconds_text(line["seconds"]), f"{line['share']:.1%}"
    return (role, call, f"{line['calls']:,}", seconds, share, speed, peak, line["where"])


def _process_notes(processes: Mapping[str, Any]) -> list[str]:
    """The largest first."""
    most = sorted(processes.items(), key=lambda item: -item[1]["peak"])
    notes = [
        f"process {label}: {megabytes(one['peak'])} MB resident at most ({one['during']}), "
        f"{megabytes(max(0, one['peak'] - one['before']))} MB above its size before the roles were built"
        for label, one in most[:MOST_PROCESSES]
    ]
    left = len(most) - MOST_PROCESSES
    return [*notes, f"{left} more processes are in summary.json"] if left > 0 else notes


def _held(found: Mapping[str, Any]) -> list[Table]:
    rows = []
    for role, held in found.get("held", {}).items():
        sizes = [held[kind] for kind in ("weights", "gradients", "moments", "shared")]
        if any(sizes):
            rows.append((role, *map(megabytes, sizes), ", ".join(held["owners"])))
    if not rows:
        return []
    head = ("role", "weights", "gradients", "moments", "shared", "with")
    note = "of one rank, at the end of the run; memory that roles share is counted with the first of them"
    return [Table("held by the roles, MB", head, tuple(rows), 1, (note,))]
