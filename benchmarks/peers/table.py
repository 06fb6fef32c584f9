"""Finished rows as Markdown: time and memory of both sides, goals, and what a reader needs to judge them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SAME_LOSS = 1e-3
HEADINGS = (
    "work", "against", "Tutelage s", "peer s", "times as fast", "range", "goal", "", "Tutelage MB", "peer MB",
    "runs: Tutelage MB", "peer MB", "lower", "first loss, both",
)  # fmt: skip


def medians(row: Mapping[str, Any], clock: str) -> tuple[float, float]:
    """Seconds of Tutelage and of the peer."""
    key = "seconds" if clock == "elapsed" else "processor"
    ours, theirs = ([r[side][key] for r in row["rounds"]] for side in ("tutelage", "peer"))
    return statistics.median(ours), statistics.median(theirs)


def ratios(row: Mapping[str, Any], clock: str) -> list[float]:
    """Of the two runs of each round, which saw the same machine."""
    key = "seconds" if clock == "elapsed" else "processor"
    return [r["peer"][key] / r["tutelage"][key] for r in row["rounds"]]


def own_bytes(row: Mapping[str, Any], side: str) -> int:
    """The allocator's peak where the device has one, else the process's peak less its size after imports."""
    found = row["memory"][side]
    return int(found["device_peak"] or found["peak"] - found["imports"])


def runs_bytes(row: Mapping[str, Any], side: str) -> int | None:
    """Of the runs alone, loading left out, less the size after imports; None where the kernel does not tell them apart.

    On a device that has an allocator this says nothing new.
    """
    found = row["memory"][side]
    return None if found["device_peak"] or found.get("runs") is None else int(found["runs"] - found["imports"])


def lower(row: Mapping[str, Any]) -> str:
    """Whether this side's memory is below the peer's: at the peak of the process, and at that of the runs."""
    own, peers = ((own_bytes(row, side), runs_bytes(row, side)) for side in ("tutelage", "peer"))
    said = ["yes" if own[0] < peers[0] else "**no**"]
    if own[1] is not None and peers[1] is not None:
        said.append("yes" if own[1] < peers[1] else "**no**")
    return said[0] if len(set(said)) == 1 else ", ".join(said)


def megabytes(amount: int | None) -> str:
    return "" if amount is None else f"{amount / 1e6:.0f}"


def first_losses(row: Mapping[str, Any]) -> tuple[float, float] | None:
    if not row["work"]["same_loss"]:
        return None
    ours, theirs = (row["ready"][side]["first"]["losses"][0] for side in ("tutelage", "peer"))
    return ours, theirs


def agree(losses: tuple[float, float]) -> bool:
    return abs(losses[0] - losses[1]) <= SAME_LOSS * abs(losses[1])


def comparison(row: Mapping[str, Any], clock: str) -> list[str]:
    name = row["name"]
    if "skipped" in row:
        return [name, row["skipped"], *[""] * (len(HEADINGS) - 2)]
    if "error" in row:
        return [name, f"failed: {row['error']}", *[""] * (len(HEADINGS) - 2)]
    work, (ours, theirs), each = row["work"], medians(row, clock), ratios(row, clock)
    losses = first_losses(row)
    ratio = theirs / ours
    said = "" if losses is None else f"{losses[0]:.5g}, {losses[1]:.5g}{'' if agree(losses) else ' **differ**'}"
    return [
        name,
        work["peer"],
        f"{ours:.3g}",
        f"{theirs:.3g}",
        f"{ratio:.2f}",
        f"{min(each):.2f} - {max(each):.2f}",
        f">= {work['goal']:g}",
        "met" if ratio >= work["goal"] else f"missed by {work['goal'] - ratio:.2f}",
        *(megabytes(own_bytes(row, side)) for side in ("tutelage", "peer")),
        *(megabytes(runs_bytes(row, side)) for side in ("tutelage", "peer")),
        lower(row),
        said,
    ]


def rows_of_table(rows: Sequence[Mapping[str, Any]], clock: str) -> list[str]:
    """The comparison, and below it the shares of the multiply rate, where those were run."""
    compared = [row for row in rows if "shares" not in row]
    lines = []
    if compared:
        lines = markdown(HEADINGS, [comparison(row, clock) for row in compared])
    for row in rows:
        if "shares" in row and "error" not in row:
            lines += ["", *shares(row["shares"])]
    return lines


def shares(found: Mapping[str, Any]) -> list[str]:
    cells = [
        [
            name,
            str(stage["batch"]),
            f"{stage['seconds']:.3g}",
            f"{stage['gflops']:.1f}",
            f"{stage['share']:.0%}",
            f">= {stage['goal']:.0%}",
            "met" if stage["share"] >= stage["goal"] else f"missed by {stage['goal'] - stage['share']:.0%}",
        ]
        for name, stage in found["stages"].items()
    ]
    headings = ("stage", "sequences", "s", "GFLOP/s", f"share of {found['rate']:.1f} GFLOP/s", "goal", "")
    return markdown(headings, cells)


def markdown(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *cells)]


def settings_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings of both sides, versions, threads, machine, load average; what was done once before."""
    lines = []
    for row in rows:
        if "machine" not in row or "skipped" in row:
            continue
        load = " -> ".join(f"{average[0]:.1f}" for average in row["load"])
        asked, about = row["asked"], ", ".join(f"{key} {value}" for key, value in row["machine"].items())
        lines.append(f"- **{row['name']}**: {asked['threads']} threads, {asked['repeat']} rounds, load {load}; {about}")
        if "ready" not in row:
            continue
        for side, ready in row["ready"].items():
            memory = row["memory"][side]
            lines.append(f"  - {side}: {named(ready['versions'])}; {named(ready['settings'])}")
            runs = memory.get("runs")
            sizes = "" if runs is None else f"peak of the runs {runs / 1e6:.0f} MB, "
            sizes += f"peak {memory['peak'] / 1e6:.0f} MB, after imports {memory['imports'] / 1e6:.0f} MB"
            once = "".join(f"; once: {what} {took:.1f} s" for what, took in ready["once"].items())
            losses = ready["first"].get("losses")
            first = "" if not losses else f"; losses of the first run {', '.join(f'{x:.6g}' for x in losses)}"
            lines.append(f"    - {sizes}{once}{first}")
    return lines


def named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
