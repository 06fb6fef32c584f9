"""metrics.jsonl and events.jsonl of a run folder: append-only, one JSON object a line, readable after `kill -9`.

A line reaches the operating system before `log` returns.  A line that a crash cut short is dropped by the readers and
removed when the log is opened again; a line that cannot be written whole (disk full) is taken back before the error is
raised.  Values that JSON has no number for are the strings "NaN", "Infinity" and "-Infinity"; `read_metrics` turns them
back.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from tutelage.errors import CheckpointError, DataError

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any) -> Any:
    """`value` with every float that JSON cannot hold spelled as a string; Mappings, lists and tuples are walked."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def number(value: Any) -> Any:
    """The float that `to_json` spelled as a string; anything else as it is."""
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def write_error(path: Path, error: OSError) -> CheckpointError:
    """An OSError while writing into a run folder, as an error that says what, where and what to do."""
    reason = error.strerror or str(error)
    fixes = {
        errno.ENOSPC: f"free space on the disk of {path.parent}, then resume the run",
        errno.EDQUOT: f"free space in the quota that {path.parent} counts against, then resume the run",
        errno.EACCES: f"make {path.parent} writable, or choose another output_dir",
        errno.EROFS: "choose an output_dir that is not read-only",
    }
    fix = fixes.get(error.errno or 0, f"make sure that {path.parent} can be written to")
    return CheckpointError(f"cannot write {path}: {reason}", fix=fix)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise CheckpointError in place of an OSError that happens while `path` is written."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise write_error(path, error) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write beside `path` and rename into place. Raises CheckpointError; the old content then stays as it was."""
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(data)
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file; none when the file does not exist.

    A last line that does not end in a newline and is not JSON was cut by a crash and is left out. Any other line that
    is not a JSON object raises DataError with its number.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", fix="check the path and its rights"
        ) from error
    lines = data.split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise DataError(
                f"{path} line {number} is not JSON: {line[:80]!r}", fix="repair or remove that line"
            ) from error
        if not isinstance(record, dict):
            raise DataError(f"{path} line {number} is not a JSON object: {line[:80]!r}", fix="remove that line")
        records.append(record)
    return records


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """All records of metrics.jsonl, in the order they were written. Raises DataError as `read_jsonl`."""
    return [{k: number(v) for k, v in record.items()} for record in read_jsonl(Path(folder) / METRICS)]


def read_events(folder: Path | str) -> list[dict[str, Any]]:
    """All records of events.jsonl, in the order they were written. Raises DataError as `read_jsonl`."""
    return read_jsonl(Path(folder) / EVENTS)


class _Lines:
    """One JSON-lines file open for appending, unbuffered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self.file: FileIO = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            self.torn = self._mend()

    def _mend(self) -> bool:
        """Remove a last line that was cut short, or give a whole one its newline. True when one was removed."""
        data = self.path.read_bytes() if self.path.is_file() else b""
        if not data or data.endswith(b"\n"):
            return False
        start = data.rfind(b"\n") + 1
        try:
            json.loads(data[start:])
        except ValueError:
            self.file.truncate(start)
            return True
        self._write(b"\n")
        return False

    def _write(self, data: bytes) -> None:
        size = os.fstat(self.file.fileno()).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self.file.write(rest) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                self.file.truncate(size)
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(to_json(record), ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self.path):
            self._write(line.encode("utf-8", errors="backslashreplace"))

    def keep(self, last_step: int) -> int:
        """Drop records of a later step; how many were dropped."""
        records = read_jsonl(self.path)
        kept = [record for record in records if record.get("step", 0) <= last_step]
        if len(kept) < len(records):
            lines = [json.dumps(to_json(record), ensure_ascii=False) + "\n" for record in kept]
            self.file.close()
            write_bytes(self.path, "".join(lines).encode("utf-8", errors="backslashreplace"))
            with writing(self.path):
                self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        return len(records) - len(kept)


class MetricsLog:
    """Writer of metrics.jsonl and events.jsonl; also a `protocols.Tracker`.

    Opening creates the folder, continues existing files, and removes a line that a crash cut short (and says so in
    events.jsonl).  Every method that writes raises CheckpointError when it cannot.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        with writing(self.folder / METRICS):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _Lines(self.folder / METRICS)
        self._events = _Lines(self.folder / EVENTS)
        for lines in (self._metrics, self._events):
            if lines.torn:
                last = max((r.get("step", 0) for r in read_jsonl(lines.path)), default=0)
                self.event(last, "log", f"the last line of {lines.path.name} had been cut short; it was removed")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append {"step", "time" (Unix seconds), **metrics}."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._metrics.append({"step": step, "time": round(time.time(), 3), **numbers})

    def event(self, step: int, kind: str, message: str, **details: Any) -> None:
        """Append {"step", "time", "kind", "message", **details}."""
        self._events.append({"step": step, "time": round(time.time(), 3), "kind": kind, "message": message, **details})

    def truncate_after(self, step: int) -> int:
        """Drop metrics and events of steps after `step`, which a resumed run will take again; how many metrics went."""
        self._events.keep(step)
        return self._metrics.keep(step)

    def close(self) -> None:
        self._metrics.file.close()
        self._events.file.close()
