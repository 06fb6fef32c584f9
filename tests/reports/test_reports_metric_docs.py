"""docs/metrics.md holds every metric that the package names, and says unit and denominator of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(
    r"[\"'`]((?:reward|kl|policy|value|rollout|time|eval|sft|rm|dpo|schedule|off_policy|memory|data)/[a-z_]+)[\"'`]"
)
ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, ...]]:
    """Name -> the other cells of its row; `a`, `b` share a row."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return {name: row[1:] for row in ROW.findall(text) for name in re.findall(r"`([^`]+)`", row[0])}


def named_in(folder: str) -> dict[str, str]:
    """Metric-like literals of the source, and a file that has each."""
    files = sorted((ROOT / "src" / "tutelage" / folder).rglob("*.py"))
    return {name: path.name for path in files for name in NAME.findall(path.read_text(encoding="utf-8"))}


def test_every_metric_named_in_the_source_is_documented() -> None:
    known = documented()
    assert len(known) > 50
    missing = {name: where for name, where in named_in("").items() if name not in known}
    assert missing == {}


@pytest.mark.parametrize(
    "prefix",
    [
        "reward",
        "kl",
        "policy",
        "value",
        "rollout",
        "sft",
        "rm",
        "dpo",
        "schedule",
        "off_policy",
        "eval",
        "time",
        "memory",
    ],
)
def test_every_family_is_there_and_every_row_has_a_meaning_and_a_unit(prefix: str) -> None:
    rows = {name: cells for name, cells in documented().items() if name.startswith(f"{prefix}/")}
    assert rows
    assert all(meaning.strip() and unit.strip() for meaning, unit, *_ in rows.values())


def test_the_scan_sees_what_it_should() -> None:
    assert "kl/sequence" in named_in("algorithms")
