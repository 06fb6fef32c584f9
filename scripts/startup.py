"""How long commands take to answer, and what a Ray cluster costs at the start of a run.

    python scripts/startup.py [--repeats N] [--steps N]

Three tables in Markdown: commands that load no model; one run of the bundled task in one process and on a Ray instance
of one device, each in a fresh process, with the parts of its wall seconds; a step of both once warm.  Of repeated runs
the fastest is shown: on a busy machine the others measure its load.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-c", "from tutelage.cli import main; main()")
CALLS = 7
LIMIT_S = 0.5
"""What `tutelage --help` may take."""
WAIT_S = 600
PARTS = (
    "imports",
    "data and checks",
    "import of ray",
    "ray.init",
    "pools placed",
    "worker processes up",
    "roles built (on Ray: with the imports of the worker)",
    "run folder and training",
    "end",
)


# ---- commands ----


def command_table() -> tuple[list[str], float]:
    """Rows of the first table, and the median wall seconds of `tutelage --help`."""
    rows, medians = ["| command | median | fastest | slowest | CPU, median |", "|---|---|---|---|---|"], []
    commands = {f"tutelage {words}": [*COMMAND, *words.split()] for words in ("--help", "recipes", "run --help")}
    for name, command in {**commands, "python -c pass": [sys.executable, "-c", "pass"]}.items():
        calls = [seconds_of(command) for _ in range(CALLS)]
        wall, cpu = ([call[kind] for call in calls] for kind in (0, 1))
        medians.append(statistics.median(wall))
        figures = " | ".join(f"{value:.2f} s" for value in (medians[-1], min(wall), max(wall), statistics.median(cpu)))
        rows.append(f"| `{name}` ({CALLS} calls) | {figures} |")
    return rows, medians[0]


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""
    started, used = time.perf_counter(), cpu_seconds()
    subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)
    return time.perf_counter() - started, cpu_seconds() - used


# ---- one run, in a process of its own ----


@contextmanager
def timed(parts: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        parts[name] = parts.get(name, 0.0) + time.perf_counter() - started


def watch(owner: Any, function: str, parts: dict[str, float], name: str) -> None:
    """Add the seconds of every call of a function of the package to a part."""
    inner: Callable[..., Any] = getattr(owner, function)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with timed(parts, name):
            return inner(*args, **kwargs)

    setattr(owner, function, wrapped)


def measured_run(root: Path, transport: str, steps: int) -> dict[str, Any]:
    """The demo's SFT: seconds by part, and of its steps."""
    parts: dict[str, float] = {}
    with timed(parts, "imports"):
        from tutelage.build import run
        from tutelage.config import load_checked
        from tutelage.reports.metrics_log import read_metrics
        from tutelage.transport.local import LocalTransport
    if transport == "ray":
        with timed(parts, "import of ray"):
            from tutelage.transport.ray import transport as ray
        watch(ray, "connect", parts, "ray.init")
        watch(ray, "place", parts, "pools placed")
        watch(ray, "find_homes", parts, "worker processes up")
        watch(ray.RayTransport, "_host", parts, "roles built (on Ray: with the imports of the worker)")
        watch(ray.RayTransport, "close", parts, "end")
    else:
        watch(LocalTransport, "start", parts, "roles built (on Ray: with the imports of the worker)")
    for name in ("start_folder", "assemble", "finish"):
        watch(run, name, parts, "run folder and training")
    for name in ("stage_data", "build_stage", "require_named", "require_ready"):
        watch(run, name, parts, "data and checks")
    overrides = [
        f"model.path={root / 'model'}",
        f"data.train={root / 'data' / 'demonstrations.jsonl'}",
        f"output_dir={root}",
        f"name={transport}",
        f"max_steps={steps}",
        f"cluster.transport={transport}",
    ]
    result = run.run_recipe(load_checked("demo_sft", overrides)[0], "plain")
    seconds = [record["time/step_s"] for record in read_metrics(result.folder) if "time/step_s" in record]
    return {"parts": parts, "steps": seconds, "loss": result.summary.get("after")}


def in_process(root: Path, transport: str, steps: int) -> dict[str, Any]:
    """The same in a fresh process: its wall seconds, start and end of Python included, and its CPU seconds."""
    file = root / f"{transport}.json"
    command = [sys.executable, __file__, "--measure", transport, str(root), str(file), "--steps", str(steps)]
    started, used = time.perf_counter(), cpu_seconds()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=WAIT_S)
    return {
        "wall": time.perf_counter() - started,
        "cpu": cpu_seconds() - used,
        **json.loads(file.read_text(encoding="utf8")),
    }


def cpu_seconds() -> float:
    """Of every process that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_tables(steps: int, repeats: int) -> list[str]:
    """Rows of the second and third table."""
    from tutelage.demo.corpus import write_corpus
    from tutelage.demo.model import build_model_folder

    best: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        write_corpus(root / "data", 0)
        build_model_folder(root / "model", 0)
        for _ in range(repeats):
            for transport in ("local", "ray"):
                found = in_process(root, transport, steps)
                if transport not in best or found["wall"] < best[transport]["wall"]:
                    best[transport] = found
    local, ray = best["local"], best["ray"]
    rows = ["", f"| demo_sft, {steps} steps | local | ray | difference |", "|---|---|---|---|"]
    rows += [row(part, local["parts"].get(part, 0.0), ray["parts"].get(part, 0.0)) for part in PARTS]
    rest = [found["wall"] - sum(found["parts"].values()) for found in (local, ray)]
    rows.append(row("start of Python, the recipe, what is left", *rest))
    rows.append(row("**all**", local["wall"], ray["wall"]))
    rows.append(row("CPU of the process itself", local["cpu"], ray["cpu"]))
    rows += ["", "| a step | local | ray | difference |", "|---|---|---|---|"]
    rows.append(row("the first", local["steps"][0], ray["steps"][0], 4))
    warm = [statistics.median(found["steps"][len(found["steps"]) // 2 :]) for found in (local, ray)]
    rows.append(row(f"median of the last {steps - steps // 2}", *warm, digits=4))
    rows.append(f"\nheld-out result: local {local['loss']}, ray {ray['loss']}")
    return rows


def row(name: str, local: float, ray: float, digits: int = 2) -> str:
    figures = " | ".join(f"{value:.{digits}f} s" for value in (local, ray, ray - local))
    return f"| {name} | {figures} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--measure", nargs=3, metavar=("TRANSPORT", "FOLDER", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        transport, root, file = options.measure
        found = measured_run(Path(root), transport, options.steps)
        Path(file).write_text(json.dumps(found), encoding="utf8")
        return 0
    load = os.getloadavg()[0]
    rows, median = command_table()
    print("\n".join(rows), flush=True)
    print("\n".join(run_tables(options.steps, options.repeats)), flush=True)
    print(f"\nload of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")
    if median >= LIMIT_S:
        print(f"`tutelage --help` took {median:.2f} s, allowed are {LIMIT_S} s", file=sys.stderr)
    return int(median >= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
