"""The driver's ear: progress and log lines of every rank, gathered from the agents of the nodes while it waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tutelage.transport.ray.agent import LAST_LINES, NodeAgent, Progress, last_of, log_path

EVERY = 0.3
MOST_HELD = 10_000
PATIENCE = 5.0


@dataclass
class Ear:
    """One node's agent, the question that is open, and when the next may be asked."""

    actor: Any
    asked: Any = None
    after: float = 0.0


@dataclass
class Watched:
    """A rank: where it runs, its last lines, and its last progress."""

    node: str
    shown: str
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    progress: Progress | None = None


class Watch:
    """Every line is prefixed `[pool rank@node]`; until `keep_logs` names a folder, the last `MOST_HELD` are held.

    environment: Ray runtime environment of the agents.
    """

    def __init__(self, run: str, progress: Callable[[str, int, int], None]) -> None:
        self.run = run
        self.progress = progress
        self.environment: dict[str, Any] = {}
        self.ears: dict[str, Ear] = {}
        self.ranks: dict[str, Watched] = {}
        self.file: IO[str] | None = None
        self.held: deque[str] = deque(maxlen=MOST_HELD)

    def keep_logs(self, log_dir: Path) -> None:
        """From here on, and with what is held, into workers.log of a folder."""
        log_dir.mkdir(parents=True, exist_ok=True)
        self.file = (log_dir / "workers.log").open("a", buffering=1)
        self.file.writelines(self.held)
        self.held.clear()

    def agent(self, node: str) -> Any:
        """The agent of a node, started where there is none."""
        if node not in self.ears:
            where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            kind = ray.remote(NodeAgent).options(
                num_cpus=0, scheduling_strategy=where, runtime_env=self.environment or None
            )
            actor = kind.remote(self.run)
            self.ears[node] = Ear(actor)
        return self.ears[node].actor

    def add(self, label: str, node: str, shown: str) -> None:
        self.ranks[label] = Watched(node, shown)
        self.agent(node).watch.remote(label)

    def poll(self) -> None:
        """Take what has arrived and ask again; never waits."""
        now = time.monotonic()
        for node, ear in list(self.ears.items()):
            if ear.asked is None and now >= ear.after:
                ear.asked, ear.after = ear.actor.news.remote(), now + EVERY
            elif ear.asked is not None and ray.wait([ear.asked], timeout=0)[0]:
                asked, ear.asked = ear.asked, None
                self._take(node, asked)

    def drain(self) -> None:
        """The lines that are still on the nodes, within a few seconds."""
        for node, ear in list(self.ears.items()):
            while node in self.ears:
                ear.asked = ear.asked or ear.actor.news.remote()
                if not ray.wait([ear.asked], timeout=PATIENCE)[0]:
                    break  # a loaded node: the question stays open
                asked, ear.asked = ear.asked, None
                if not self._take(node, asked):
                    break

    def _take(self, node: str, asked: Any) -> bool:
        """Of an answer that is there: whether it has lines, so that there may be more."""
        try:
            news = ray.get(asked)
        except RayError:
            self.ears.pop(node, None)  # the node is gone; its ranks are reported by their own calls
            return False
        for label, line in news.lines:
            rank = self.ranks[label]
            rank.last.append(line)
            text = f"[{rank.shown}] {line}\n"
            if self.file is not None:
                self.file.write(text)
            else:
                self.held.append(text)
        for label, progress in news.progress.items():
            self.ranks[label].progress = progress
        for told in {(p.call, p.what) for p in news.progress.values()}:
            self._show(*told)
        return bool(news.lines)

    def _show(self, call: int, what: str) -> None:
        """The sum over the ranks that work on the same thing."""
        same = [
            r.progress for r in self.ranks.values() if r.progress and (r.progress.call, r.progress.what) == (call, what)
        ]
        self.progress(what, sum(p.done for p in same), sum(p.total for p in same))

    def last_lines(self, label: str) -> list[str]:
        """The end of a rank's log: read here where it lies on this machine, else from its node, or what came before."""
        rank = self.ranks.get(label)
        if rank is None:
            return []
        if (here := log_path(self.run, label)).is_file():
            return last_of(here)
        ear = self.ears.get(rank.node)
        if ear is not None:
            try:
                return list(ray.get(ear.actor.last_lines.remote(label), timeout=PATIENCE))
            except GetTimeoutError:
                return list(rank.last)
            except RayError:
                self.ears.pop(rank.node, None)
        return list(rank.last)

    def sees(self, path: str, content: str, seconds: float) -> list[str]:
        """What each node that does not read `content` at `path` found instead."""
        asked = [ear.actor.sees.remote(path, content) for ear in self.ears.values()]
        return [answer for answer in ray.get(asked, timeout=seconds) if answer]

    def close(self) -> None:
        self.drain()
        for ear in self.ears.values():
            try:
                ray.get(ear.actor.clean.remote(), timeout=PATIENCE)
                ray.kill(ear.actor)
            except (RayError, TimeoutError):
                continue  # the node is gone with its files
        self.ears.clear()
        if self.file is not None:
            self.file.close()
            self.file = None
