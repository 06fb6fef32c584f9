"""Responses without a score, kept with the run: samples/errors.jsonl, one a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tutelage.reports.metrics_log import read_jsonl, to_json, write_bytes

FILE = "errors.jsonl"


class UnscoredResponses:
    """Takes what the reward role could not score and writes it down with the step and the phase.

    phase is training, or that of an evaluation.  Lines of the same phase from this step on, which a resumed run takes
    again, are replaced.
    """

    def __init__(self, roles: Any, folder: Path) -> None:
        self.roles = roles
        self.path = folder / "samples" / FILE

    def take(self, step: int, phase: str = "training") -> int:
        """How many there were since the last call, on all ranks."""
        found = [record for rank in self.roles.reward.take_errors().gather() for record in rank]
        return self.write(step, phase, found)

    def write(self, step: int, phase: str, records: Iterable[Mapping[str, Any]]) -> int:
        """Each response and reason once, whichever ranks tell it."""
        new = {(r["id"], r["sample"], r["error"]): {"step": step, "phase": phase, **r} for r in records}
        if not new:
            return 0
        old = [r for r in read_jsonl(self.path) if r["phase"] != phase or r["step"] < step]
        lines = [json.dumps(to_json(r), ensure_ascii=False, default=str) + "\n" for r in [*old, *new.values()]]
        write_bytes(self.path, "".join(lines).encode("utf-8", errors="backslashreplace"))
        return len(new)
