"""One small actor per node: it reads the logs of the node's ranks, keeps their progress, and looks at shared folders.

It outlives the ranks, so the last words of a dead one can still be read.
"""

from __future__ import annotations

import socket
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

LAST_LINES = 20
MOST_BYTES = 1 << 18


@dataclass(frozen=True)
class Progress:
    """What a rank last said about a call: done of total."""

    call: int
    what: str
    done: int
    total: int


@dataclass(frozen=True)
class News:
    """Since the last question: lines by rank label, and progress by rank label."""

    lines: list[tuple[str, str]]
    progress: dict[str, Progress]


@dataclass
class Tail:
    """A log file that is being read."""

    path: Path
    position: int = 0
    rest: bytes = b""
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def new_lines(self) -> list[str]:
        """Whole lines written since the last call, at most `MOST_BYTES` of them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                data = file.read(MOST_BYTES)
        except FileNotFoundError:
            return []
        self.position += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        lines = [line.decode(errors="replace") for line in whole]
        self.last.extend(lines)
        return lines


def last_of(path: Path) -> list[str]:
    """The end of a log as it is at this moment."""
    tail = Tail(path)
    while tail.new_lines():
        pass
    return [*tail.last, *([tail.rest.decode(errors="replace")] if tail.rest else [])][-LAST_LINES:]


def log_path(run: str, label: str) -> Path:
    """Where a rank writes on its node."""
    return Path(tempfile.gettempdir()) / f"tutelage-{run}" / f"{label.replace(' ', '-')}.log"


class NodeAgent:
    """`run` names the files of one transport."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.tails: dict[str, Tail] = {}
        self.progress: dict[str, Progress] = {}

    def watch(self, label: str) -> None:
        """Read the log of a rank from its start."""
        self.tails[label] = Tail(log_path(self.run, label))

    def report(self, label: str, progress: Progress) -> None:
        self.progress[label] = progress

    def news(self) -> News:
        lines = [(label, line) for label, tail in self.tails.items() for line in tail.new_lines()]
        progress, self.progress = self.progress, {}
        return News(lines, progress)

    def last_lines(self, label: str) -> list[str]:
        """The end of a rank's log, with a last line that has no end."""
        tail = self.tails.get(label)
        return [] if tail is None else last_of(tail.path)

    def sees(self, path: str, content: str) -> str:
        """Empty where this node reads `content` from the file, else what it found."""
        try:
            found = Path(path).read_text()
        except OSError as error:
            return f"{socket.gethostname()}: {error.strerror or error}"
        return "" if found == content else f"{socket.gethostname()}: another file is there"

    def clean(self) -> None:
        """Remove the logs of this transport from the node."""
        for tail in self.tails.values():
            tail.path.unlink(missing_ok=True)
        folder = log_path(self.run, "x").parent
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
