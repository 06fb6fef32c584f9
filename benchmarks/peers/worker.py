"""The other end of `wire`: a worker process, asked with a deadline."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WorkerError(Exception):
    """A worker that failed, fell silent or ended; the message says where its log is."""


class Worker:
    """A side of a row.  log: its standard error; patience: seconds until an answer that does not come is given up."""

    def __init__(self, name: str, command: list[str], log: Path, patience: float, environ: Mapping[str, str]) -> None:
        self.name, self.log, self.patience = name, log, patience
        with log.open("w", encoding="utf8") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environ},
            )
        self._unread = b""

    def reply(self) -> dict[str, Any]:
        """The next message.  Raises WorkerError."""
        assert self.process.stdout is not None
        end, pipe = time.monotonic() + self.patience, self.process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise WorkerError(f"{self.name} said nothing for {self.patience:.0f} s; see {self.log}")
            read = os.read(pipe, 1 << 16)
            if not read:
                raise WorkerError(f"{self.name} ended; see {self.log}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise WorkerError(f"{self.name}: {message['error']}; see {self.log}")
        return message

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": what}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"{self.name} ended; see {self.log}") from None
        return self.reply()

    def close(self) -> None:
        """The process is gone after this, however it was."""
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
