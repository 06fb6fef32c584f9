"""A run folder read into memory for figures and reports. What a folder does not have is empty here, never an error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tutelage.errors import DataError
from tutelage.reports.metrics_log import read_events, read_metrics
from tutelage.reports.samples import Sample, read_samples


@dataclass(frozen=True)
class RunFolder:
    """config.yaml, metrics.jsonl, events.jsonl, samples/before and after, lineage.json, summary.json."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    before: list[Sample]
    after: list[Sample]
    lineage: dict[str, Any]
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.path.resolve().name)

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", ""))


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"cannot read {path}: {error}", fix="restore the file, or remove it") from error
    if value is not None and not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, not a mapping", fix="restore the file, or remove it")
    return value or {}


def load_run(folder: Path | str) -> RunFolder:
    """Raises DataError when `folder` is no run folder (neither config.yaml nor metrics.jsonl) or a file is damaged."""
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"no run folder at {path}", fix="pass the folder of a run, such as runs/NAME")
    if not (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
        raise DataError(
            f"{path} is not a run folder: it has neither config.yaml nor metrics.jsonl",
            fix="pass the folder of a run, such as runs/NAME",
        )
    return RunFolder(
        path=path,
        config=_mapping(path / "config.yaml"),
        metrics=read_metrics(path),
        events=read_events(path),
        before=read_samples(path, "before"),
        after=read_samples(path, "after"),
        lineage=_mapping(path / "lineage.json"),
        summary=_mapping(path / "summary.json"),
    )


def setting_of(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """`setting_of(config, "kl.budget")`: a nested value, or `default` where any part is missing or null."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            return default
        value = value[part]
    return value


def flat_items(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b.c", leaf) of nested mappings; lists of plain values are leaves, lists of mappings are indexed."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat_items(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from flat_items(item, f"{prefix}[{index}]")
    else:
        yield prefix, value
