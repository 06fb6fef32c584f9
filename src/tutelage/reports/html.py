"""report.html: one self-contained page about a run. No script, no network; every text from the run is escaped.

Images are inlined, and a content security policy in the page forbids scripts and any request, so that an answer that
slipped through the escaping could still do nothing.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tutelage import __version__
from tutelage.reports.figures import comparison_of, curves_of
from tutelage.reports.hacking import HackingReport, Thresholds, find_hacking
from tutelage.reports.headlines import headlines, plain_number, verdict
from tutelage.reports.metrics_log import write_bytes
from tutelage.reports.panels import metric_names, series
from tutelage.reports.resources import resource_tables, without_resources
from tutelage.reports.run_folder import RunFolder, flat_items, load_run
from tutelage.reports.samples import Sample, pair_samples

REPORT = "report.html"
TEMPLATE = "report.html"
SHOWN_PAIRS = 12
FOLDED_PAIRS = 200
SHOWN_SUSPECTS = 15
SHOWN_EVENTS = 50
MAX_CHARACTERS = 4000


@dataclass(frozen=True)
class Shortened:
    """A text and how many of its characters are not shown."""

    text: str
    cut: int


def shortened(text: str) -> Shortened:
    return Shortened(text[:MAX_CHARACTERS], max(0, len(text) - MAX_CHARACTERS))


def _figure(path: Path, alt: str) -> dict[str, str]:
    return {"data": base64.b64encode(path.read_bytes()).decode("ascii"), "alt": alt, "file": f"figures/{path.name}"}


def _figures(run: RunFolder) -> list[dict[str, str]]:
    found = []
    if metric_names(run.metrics):
        found.append(_figure(curves_of(run), "Training curves over steps"))
    if pair_samples(run.before, run.after)[0]:
        found.append(
            _figure(comparison_of(run), "Distribution of the reward on the same prompts before and after training")
        )
    return found


def _pair(before: Sample, after: Sample) -> dict[str, Any]:
    gold = None
    if before.gold is not None and after.gold is not None:
        gold = plain_number(after.gold - before.gold, sign=True)
    return {
        "id": after.id,
        "prompt": shortened(after.prompt),
        "before": _answer(before),
        "after": _answer(after),
        "proxy": plain_number(after.proxy - before.proxy, sign=True),
        "gold": gold,
    }


def _answer(sample: Sample) -> dict[str, Any]:
    facts = [f"proxy {plain_number(sample.proxy)}"]
    if sample.gold is not None:
        facts.append(f"gold {plain_number(sample.gold)}")
    facts.append(f"{sample.length} tokens" + ("" if sample.finished else ", cut by the length limit"))
    if sample.ref_logp_per_token is not None:
        facts.append(f"reference {plain_number(sample.ref_logp_per_token)} nats per token")
    return {"text": shortened(sample.response), "facts": " · ".join(facts)}


def _suspects(found: HackingReport) -> list[dict[str, Any]]:
    return [
        {
            "id": s.sample.id,
            "prompt": shortened(s.sample.prompt),
            "before": _answer(s.before) if s.before is not None else None,
            "after": _answer(s.sample),
            "reasons": s.reasons,
        }
        for s in found.suspects[:SHOWN_SUSPECTS]
    ]


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _rows(mapping: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, _value(value)) for key, value in flat_items(mapping) if key]


def _last_metrics(run: RunFolder) -> list[tuple[str, str, str, int]]:
    """(name, first, last, step of the last) of every metric."""
    rows = []
    for name in sorted(metric_names(run.metrics)):
        steps, values = series(run.metrics, name)
        rows.append((name, plain_number(values[0]), plain_number(values[-1]), steps[-1]))
    return rows


def _context(run: RunFolder) -> dict[str, Any]:
    pairs, unpaired = pair_samples(run.before, run.after)
    hacking = find_hacking(run.before, run.after) if run.after else None
    kinds = Counter(str(event.get("kind", "")) for event in run.events)
    shown = [_pair(before, after) for before, after in pairs[: SHOWN_PAIRS + FOLDED_PAIRS]]
    return {
        "name": run.name,
        "algorithm": run.algorithm,
        "version": __version__,
        "steps": max((int(r.get("step", 0)) for r in run.metrics), default=0),
        "headlines": headlines(run),
        "verdict": verdict(run),
        "figures": _figures(run),
        "pairs": shown[:SHOWN_PAIRS],
        "folded": shown[SHOWN_PAIRS:],
        "pair_count": len(pairs),
        "unpaired": unpaired,
        "hacking": hacking,
        "bar": plain_number(hacking.bar) if hacking else "",
        "suspects": _suspects(hacking) if hacking else [],
        "thresholds": Thresholds(),
        "events": run.events[:SHOWN_EVENTS],
        "event_count": len(run.events),
        "event_kinds": kinds.most_common(),
        "settings": _rows(run.config),
        "lineage": _rows(run.lineage),
        "summary": _rows(without_resources(run.summary)),
        "resources": resource_tables(run.summary),
        "metrics": _last_metrics(run),
    }


def render(run: RunFolder) -> str:
    """The page as text; also writes the figures it inlines. Raises DataError, CheckpointError."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(_context(run))


def write_report(run_folder: Path | str) -> Path:
    """Draw the figures, write report.html, and return its path.

    Works on any run folder, unfinished ones too: what is not there is left out. Raises DataError when a file of the run
    is damaged or the folder is none, CheckpointError when the page cannot be written.
    """
    run = load_run(run_folder)
    path = run.path / REPORT
    write_bytes(path, render(run).encode("utf-8", errors="backslashreplace"))
    return path
