#!/usr/bin/env python3
"""Two Ray nodes on one machine, a PPO run over both, and what happens when one of them, or the driver, is ended.

    python scripts/two_nodes.py [--only CASE ...] [--steps 5] [--write docs/results/two_nodes.md]

Everything is made offline in a temporary folder.  The nodes are real ones: two `ray start`, each with a raylet, an
object store, an address and a working folder of its own.  Every run is a `tutelage` command in a process of its own.
The actor, the critic and the reference are cut over both nodes (FSDP of two ranks).

    undisturbed   the run whose metrics the others must repeat
    sigterm       SIGTERM to the driver during a step, then `tutelage resume`
    node_lost     SIGKILL of every process of the second node during a step; resume on the node that is left
    restart       the same kill with cluster.restarts=1: the run goes on by itself
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
from equality import make_model, write_data
from safetensors.torch import load_file

from tutelage.reports.metrics_log import read_events, read_metrics

TUTELAGE = (sys.executable, "-c", "from tutelage.cli import main; main()")
RAY = str(Path(sys.executable).with_name("ray"))
DISTURBED = 3
"""The step after which a run is disturbed, while it takes the next one; its last checkpoint is of step 2."""
DELAY_S = 0.3
COMMAND_S = 900
METRICS, WEIGHTS = 1e-5, 1e-6
"""Largest |difference| to the undisturbed run that counts as equal: of metrics relative to 1 + |metric|, of weights."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
RECIPE = """\
algorithm: ppo
name: ppo
output_dir: runs
model: {{path: model, chat_template: plain}}
data: {{train: ppo.jsonl, eval_fraction: 0}}
rollout: {{prompts_per_step: 5, samples_per_prompt: 2, max_new_tokens: 24}}
ppo: {{epochs: 2, minibatches: 2}}
reward:
  rules: [{{function: length_range(low=2)}}]
optim: {{lr: 1.0e-3, schedule: constant}}
checkpoint: {{every: 2, keep: 9}}
max_steps: {steps}
epochs: 99
cluster:
  transport: ray
  pools:
    main: {{devices: 2, kind: cpu, per_device: 0.5, strategy: STRICT_SPREAD}}
  layout:
    default: {{shard: 2}}
  start_timeout: 120
  collective_timeout: 180
  call_timeout: 600
  runtime_env: {{env_vars: {{GLOO_SOCKET_IFNAME: lo}}}}
"""


class Node:
    """One `ray start`, with every process that it starts.  `head`: the address of the cluster to join, or None."""

    def __init__(self, folder: Path, host: str, head: str | None, port: int) -> None:
        self.folder, self.host = folder, host
        folder.mkdir(parents=True)
        joins = ("--address", head, "--node-ip-address", host) if head else ("--head", "--port", str(port))
        own = () if head else ("--include-dashboard=false", f"--ray-client-server-port={free_port()}")
        self.log = folder / "start.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [
                    *(RAY, "start", "--block", "--disable-usage-stats", "--num-cpus=1", *joins, *own),
                    *("--object-store-memory=80000000", f"--temp-dir={folder}"),
                    *("--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_port()}"),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **ENVIRONMENT, "TMPDIR": str(folder)},
            )

    def ready(self) -> Node:
        """Waits until Ray says that the node is up."""
        for _ in range(1200):
            if "Ray runtime started" in self.log.read_text():
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"the node at {self.host} did not start:\n{self.log.read_text()}")

    def kill(self) -> None:
        """SIGKILL to every process of the node at once, as when a machine goes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            for process in [*top.children(recursive=True), top]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


@dataclass
class Cluster:
    """A head and, where it is there, a second node."""

    root: Path
    port: int
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def second(self) -> Node:
        """The second node, started where there is none."""
        alive = [node for node in self.nodes[1:] if node.process.poll() is None]
        if not alive:
            number = len(self.nodes)
            alive = [Node(self.root / f"n{number}", f"127.0.0.{number + 1}", self.address, 0).ready()]
            self.nodes += alive
        return alive[0]


@contextlib.contextmanager
def ray_nodes(root: Path) -> Iterator[Cluster]:
    """A head node; it and all nodes that join it are killed at the end, with nothing else."""
    cluster = Cluster(root, free_port())
    try:
        cluster.nodes.append(Node(root / "n0", "127.0.0.1", None, cluster.port))
        cluster.nodes[0].ready()
        yield cluster
    finally:
        for node in reversed(cluster.nodes):
            node.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@dataclass
class Command:
    """A `tutelage` command under way: its lines, each with the time it came at."""

    args: tuple[str, ...]
    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def start(cls, root: Path, *args: str) -> Command:
        process = subprocess.Popen(
            [*TUTELAGE, *args],
            cwd=root,
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        command = cls(args, process)
        assert process.stdout is not None
        assert process.stderr is not None
        for stream in (process.stdout, process.stderr):
            command.readers.append(threading.Thread(target=command.read, args=(stream,), daemon=True))
            command.readers[-1].start()
        return command

    def read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append((time.time(), line.rstrip()))

    def ended(self) -> int:
        """The exit code.  Raises TimeoutExpired, after killing it, for a command that hangs."""
        try:
            code = self.process.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for reader in self.readers:
            reader.join()
        return code

    def text(self, root: Path) -> str:
        """The command line and its output, in the order it came, with paths as seen from the workspace."""
        shown = "\n".join(line for _, line in list(self.lines)).replace(f"{root}/", "")
        return f"$ tutelage {' '.join(self.args)}\n{shown}"

    def first(self, words: str) -> tuple[float, str] | None:
        """When and in which line words came first."""
        return next(((at, line) for at, line in list(self.lines) if words in line), None)


@dataclass
class Outcome:
    """One row of the table, and what the commands of the case printed.

    seconds   from the disturbance to its message.
    metrics, weights   largest |difference| to the undisturbed run.
    """

    case: str
    happened: str
    message: str = ""
    seconds: float | None = None
    exits: list[int] = field(default_factory=list)
    last_step: int = 0
    metrics: float | None = None
    weights: float | None = None
    facts: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)


def workspace(root: Path, steps: int) -> None:
    """The model, the data and the recipe that every case runs."""
    make_model(root / "model")
    write_data(root)
    (root / "ppo.yaml").write_text(RECIPE.format(steps=steps))


def at_step(command: Command, folder: Path, step: int) -> None:
    """Waits until a run has taken a step, and a little longer."""
    deadline = time.monotonic() + COMMAND_S
    while not (folder / "metrics.jsonl").is_file() or not any(r["step"] >= step for r in read_metrics(folder)):
        if command.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not come to step {step}:\n{command.text(folder)}")
        time.sleep(0.02)
    time.sleep(DELAY_S)


def lasting(folder: Path) -> list[dict[str, Any]]:
    """Metrics by step without what depends on the clock or the machine."""
    volatile = ("time", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(volatile)} for row in read_metrics(folder)]


def metric_difference(ours: Path, theirs: Path) -> float:
    """Largest |difference| / (1 + |metric|) over all steps; infinite where a step or a metric is missing or twice."""
    a, b = lasting(ours), lasting(theirs)
    if [row.keys() for row in a] != [row.keys() for row in b] or [r["step"] for r in a] != [r["step"] for r in b]:
        return float("inf")
    pairs = [(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in x]
    return max((abs(x - y) / (1 + abs(y)) for x, y in pairs if x == x or y == y), default=0.0)


def weights(folder: Path) -> dict[str, Any]:
    """All tensors of a model folder, whose files are one a rank."""
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    assert tensors, f"{folder} holds no weights"
    return tensors


def weight_difference(ours: Path, theirs: Path, step: int) -> float:
    """Largest |difference| of the policy's weights after a step."""
    a, b = (weights(run / f"checkpoints/step_{step:06d}/model") for run in (ours, theirs))
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@dataclass
class Bench:
    """The cases, on one cluster and in one workspace."""

    root: Path
    cluster: Cluster
    steps: int

    def folder(self, name: str) -> Path:
        return self.root / "runs" / name

    def run(self, name: str, *overrides: str) -> Command:
        self.cluster.second()
        address = f"cluster.address={self.cluster.address}"
        return Command.start(self.root, "run", "ppo.yaml", f"name={name}", address, *overrides)

    def resume(self, name: str, *overrides: str) -> Command:
        return Command.start(self.root, "resume", f"runs/{name}", *overrides)

    def close(self, out: Outcome, name: str, *commands: Command) -> Outcome:
        """What a case left behind, against the undisturbed run."""
        folder, base = self.folder(name), self.folder("undisturbed")
        out.output += [command.text(self.root) for command in commands]
        out.last_step = max((int(row["step"]) for row in read_metrics(folder)), default=0)
        if out.exits[-1] == 0 and name != "undisturbed":
            out.metrics = metric_difference(folder, base)
            out.weights = weight_difference(folder, base, self.steps)
        kinds = ("cluster", "restart", "resume", "error")
        events = [event for event in read_events(folder) if event["kind"] in kinds]
        out.facts += [f"{event['kind']}, step {event['step']}: {event['message']}" for event in events]
        return out

    def undisturbed(self) -> Outcome:
        out = Outcome("undisturbed", f"{self.steps} steps over both nodes")
        command = self.run("undisturbed")
        out.exits = [command.ended()]
        return self.close(out, "undisturbed", command)

    def sigterm(self) -> Outcome:
        out = Outcome("sigterm", f"SIGTERM to the driver in step {DISTURBED + 1}; resume")
        command = self.run("sigterm")
        at_step(command, self.folder("sigterm"), DISTURBED)
        begun = time.time()
        command.process.send_signal(signal.SIGTERM)
        out.exits = [command.ended()]
        self.told(out, command, "PreemptedError", begun)
        again = self.resume("sigterm")
        out.exits.append(again.ended())
        return self.close(out, "sigterm", command, again)

    def node_lost(self) -> Outcome:
        out = Outcome("node_lost", f"second node killed in step {DISTURBED + 1}; resume on the other")
        command = self.run("node_lost")
        at_step(command, self.folder("node_lost"), DISTURBED)
        begun = self.kill_second()
        out.exits = [command.ended()]
        self.told(out, command, "was lost while", begun)
        strict = self.resume("node_lost", "cluster.start_timeout=60")
        out.exits.append(strict.ended())
        again = self.resume("node_lost", "cluster.pools.main.strategy=PACK")
        out.exits.append(again.ended())
        return self.close(out, "node_lost", command, strict, again)

    def restart(self) -> Outcome:
        out = Outcome("restart", f"second node killed in step {DISTURBED + 1}, cluster.restarts=1")
        command = self.run("restart", "cluster.restarts=1", "cluster.pools.main.strategy=SPREAD")
        at_step(command, self.folder("restart"), DISTURBED)
        begun = self.kill_second()
        out.exits = [command.ended()]
        self.told(out, command, "was lost while", begun)
        out = self.close(out, "restart", command)
        again = [
            r["time"] for r in read_metrics(self.folder("restart")) if r["step"] == DISTURBED and r["time"] > begun
        ]
        if again:
            out.facts.append(f"step {DISTURBED} was taken again {again[0] - begun:.1f} s after the kill")
        return out

    def kill_second(self) -> float:
        begun = time.time()
        self.cluster.second().kill()
        return begun

    def told(self, out: Outcome, command: Command, words: str, begun: float) -> None:
        """The first line with these words, and how long after the disturbance it came."""
        found = command.first(words)
        if found is not None:
            out.seconds, out.message = found[0] - begun, found[1].replace(f"{self.root}/", "")


CASES: dict[str, Callable[[Bench], Outcome]] = {
    "undisturbed": Bench.undisturbed,
    "sigterm": Bench.sigterm,
    "node_lost": Bench.node_lost,
    "restart": Bench.restart,
}


def show(root: Path, steps: int, names: Sequence[str]) -> dict[str, Outcome]:
    """Runs cases in a workspace; what is compared needs `undisturbed` among them."""
    workspace(root, steps)
    found = {}
    with ray_nodes(root) as cluster:
        bench = Bench(root, cluster, steps)
        for name in names:
            started = time.monotonic()
            found[name] = CASES[name](bench)
            print(f"{name}: exit {found[name].exits}, {time.monotonic() - started:.0f} s", flush=True)
            if not passed(found[name], steps):
                print("\n".join(found[name].output), flush=True)
    return found


def equal(out: Outcome) -> bool:
    """Whether a disturbed run ended as the undisturbed one."""
    return out.metrics is not None and out.weights is not None and out.metrics <= METRICS and out.weights <= WEIGHTS


def passed(out: Outcome, steps: int) -> bool:
    """Whether a case did what it must: it ended well, at the last step, and as the undisturbed run where disturbed."""
    finished = out.exits[-1] == 0 and out.last_step == steps
    return finished and (out.case == "undisturbed" or (bool(out.message) and equal(out)))


def table(found: dict[str, Outcome]) -> str:
    columns = ("case", "what happened", "seconds to the message", "message", "exit codes", "final step")
    columns += ("metrics differ by", "weights")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for out in found.values():
        seconds = "" if out.seconds is None else f"{out.seconds:.1f}"
        gaps = ["" if gap is None else f"{gap:.1g}" for gap in (out.metrics, out.weights)]
        codes, words = ", ".join(map(str, out.exits)), out.message.replace("|", "\\|")
        cells = (out.case, out.happened, seconds, words, codes, str(out.last_step), *gaps)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def page(found: dict[str, Outcome], steps: int) -> str:
    """What goes into the results page: the table, the run's own events, and the output of every command."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = subprocess.run([RAY, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {load}, {versions}, float32, seed 0, {steps} steps"
    parts = [machine, table(found)]
    for out in found.values():
        facts = "\n".join(f"* {re.sub(r'[ ]{2,}', ' ', ' '.join(fact.split()))}" for fact in out.facts)
        parts += [f"### {out.case}", facts, *(f"```text\n{text}\n```" for text in out.output)]
    return "\n\n".join(part for part in parts if part) + "\n"


MARKER = "<!-- written by scripts/two_nodes.py -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES)[1:], help="These cases, besides undisturbed.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--keep", action="store_true", help="Leave the workspace.")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="two-"))
    try:
        found = show(root, args.steps, ["undisturbed", *(args.only or list(CASES)[1:])])
    finally:
        if args.keep:
            print(f"workspace: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    text = page(found, args.steps)
    print(text)
    if args.write:
        head = args.write.read_text().partition(MARKER)[0] if args.write.exists() else ""
        args.write.write_text(f"{head}{MARKER}\n\n{text}")
    return 0 if all(passed(out, args.steps) for out in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
