"""The live display of a terminal: progress and time left, the latest metrics, the running phase, the last alarm."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tutelage.reports.display import NOTES, Clock, Pace, duration, shown_metrics, summary_rows
from tutelage.reports.resources import Table as Resources
from tutelage.reports.resources import resource_tables, without_resources

BAR_WIDTH = 40


class RichDisplay:
    """Redraws in place; notes and alarms also stay above as lines of their own.  Texts are never read as markup."""

    def __init__(
        self, total_steps: int, title: str, *, console: Console | None = None, clock: Clock = time.monotonic
    ) -> None:
        self.total_steps, self.title, self.clock = total_steps, title, clock
        self.console = console or Console()
        self.pace = Pace(total_steps, clock)
        self.done = 0
        self.metrics: dict[str, float] = {}
        self.running: tuple[str, int, int] | None = None
        self.alarm: tuple[str, str] | None = None
        self.live: Live | None = None

    def _progress(self) -> RenderableType:
        line = Table.grid(padding=(0, 2))
        eta = self.pace.eta_s()
        left = f"left {duration(eta)}" if eta is not None else f"elapsed {duration(self.clock() - self.pace.begun)}"
        cells: list[RenderableType] = [Text(self.title, style="bold")]
        if self.total_steps:
            cells += [
                ProgressBar(self.total_steps, self.done, width=BAR_WIDTH),
                Text(f"{self.done}/{self.total_steps}"),
            ]
        else:
            cells.append(Text(f"step {self.done}"))
        line.add_row(*cells, Text(left, style="cyan"))
        return line

    def _phase(self) -> RenderableType:
        if self.running is None:
            return Text(" ")
        name, done, total = self.running
        line = Table.grid(padding=(0, 2))
        line.add_row(
            Text(f"  {name}", style="dim"), ProgressBar(max(total, 1), done, width=20), Text(f"{done}/{total}")
        )
        return line

    def _metrics(self) -> RenderableType:
        """Short names over values, as many columns as the terminal holds."""
        items = shown_metrics(self.metrics)
        columns = max(1, min(len(items), (self.console.width - 2) // 19))
        grid = Table.grid(padding=(0, 3))
        for start in range(0, len(items), columns):
            row = items[start : start + columns]
            grid.add_row(*(Text(name, style="dim") for name, _ in row))
            grid.add_row(*(Text(value) for _, value in row))
        return grid

    def __rich__(self) -> RenderableType:
        parts = [self._progress(), self._phase()]
        if self.metrics:
            parts.append(self._metrics())
        if self.alarm is not None:
            parts.append(Text(f"! {self.alarm[0]}: {self.alarm[1]}", style="yellow"))
        return Group(*parts)

    def start(self) -> None:
        self.pace = Pace(self.total_steps, self.clock)
        self.live = Live(self, console=self.console, refresh_per_second=4, transient=True)
        self.live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of earlier steps stay in view until they are logged again (evaluations are rare)."""
        self.pace.observe(step)
        self.done, self.running = step, None
        self.metrics = {**self.metrics, **metrics}

    def phase(self, name: str, done: int, total: int) -> None:
        self.running = (name, done, total) if done < total else None

    def event(self, kind: str, message: str) -> None:
        if kind in NOTES:
            self.console.print(Text(f"{kind}: {message}", style="dim"))
            return
        self.alarm = (kind, message)
        self.console.print(Text(f"! step {self.done} {kind}: {message}", style="yellow"))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.close()
        table = Table(
            title=Text(f"{self.title}: done in {duration(self.clock() - self.pace.begun)}"), show_header=False
        )
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for key, text in summary_rows(without_resources(summary)):
            table.add_row(Text(key), Text(text))
        self.console.print(table)
        for found in resource_tables(summary):
            self._print_resources(found)

    def _print_resources(self, found: Resources) -> None:
        table = Table(title=Text(found.title))
        for column, name in enumerate(found.head):
            table.add_column(Text(name), justify="left" if column < found.names else "right")
        for row in found.rows:
            table.add_row(*map(Text, row))
        self.console.print(table)
        for note in found.notes:
            self.console.print(Text(note, style="dim"))

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
