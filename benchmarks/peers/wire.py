"""The worker's end of a comparison: load, warm up once, then one run for every line that asks for one.

Both sides of a row are such processes, so that their runs can take turns.  Standard library alone, since a worker may
live in an environment of its own.  Messages are lines of JSON: on standard input {"do": "run"} or {"do": "end"}, on
standard output the replies; whatever a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Job:
    """run: once, and what came of it (tokens, losses...); settings: those that a reader may ask for, as text.

    device_peak: bytes at the allocator's peak, where the device has one; once: named seconds of work done before.
    """

    run: Callable[[], dict[str, Any]]
    settings: dict[str, Any]
    device_peak: Callable[[], int] = lambda: 0
    once: dict[str, float] = field(default_factory=dict)


def resident(field: str) -> int:
    """Bytes: VmRSS, the resident size of this process, or VmHWM, its largest one; 0 where /proc does not say."""
    try:
        with open("/proc/self/status", encoding="utf8") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        return 0


def start_peak_anew() -> bool:
    """VmHWM counts from here on, so that the peak of the work is not hidden by that of loading.  False: refused."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="utf8") as file:
            file.write("5")
        return True
    except OSError:
        return False


def versions(*names: str) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def serve(import_all: Callable[[dict[str, Any]], None], load: Callable[[dict[str, Any]], Job], *packages: str) -> None:
    """The whole life of a worker.  argv: the file of its specification.

    import_all  imports what `load` and the runs need, so that memory can be told from that of the libraries.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf8")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        with open(sys.argv[1], encoding="utf8") as file:
            spec = json.load(file)
        import_all(spec)
        imports = resident("VmRSS")
        job = load(spec)
        loading = resident("VmHWM")
        apart = start_peak_anew()
        first = job.run()
        say(settings=job.settings, versions=versions(*packages), first=first, once=job.once)
        for line in sys.stdin:
            if json.loads(line)["do"] == "end":
                break
            wall, cpu = time.perf_counter(), time.process_time()
            found = job.run()
            say(seconds=time.perf_counter() - wall, processor=time.process_time() - cpu, found=found)
        runs = resident("VmHWM")
        memory = {"imports": imports, "peak": max(loading, runs), "runs": runs if apart else None}
        say(**memory, device_peak=job.device_peak())
    except Exception as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
