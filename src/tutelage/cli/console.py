"""How commands talk: errors in plain words, warnings, tables on a terminal and plain lines elsewhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import typer
from typer.core import TyperGroup

from tutelage.errors import CheckpointError, ConfigError, TutelageError, closest

if TYPE_CHECKING:
    from rich.console import RenderableType

Display = Literal["auto", "plain", "json"]
INTERRUPTED = 130


class Commands(TyperGroup):
    """The command group: a TutelageError becomes one message and an exit code; `--debug` anywhere keeps tracebacks.

    Exit codes: 2 for a config that cannot be used (as for wrong usage), 1 for every other TutelageError.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["debug"] = "--debug" in args[:end]
        return super().parse_args(ctx, [a for i, a in enumerate(args) if a != "--debug" or i > end])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TutelageError as error:
            if ctx.meta["debug"]:
                raise
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            for note in getattr(error, "__notes__", []):
                typer.echo(f"  {note}", err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


def display_of(as_json: bool, plain: bool) -> Display:
    """Which display a command asked for: JSON, plain lines (asked for, or stdout is no terminal), or the live one."""
    if as_json:
        return "json"
    return "plain" if plain or not sys.stdout.isatty() else "auto"


def warn(warnings: Iterable[str]) -> None:
    """Warnings go to stderr, one a line, so that JSON on stdout stays JSON."""
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def echo_json(value: Any, stream: TextIO | None = None) -> None:
    """One line of JSON on the stream, default stdout; NaN and infinities as null."""
    typer.echo(json.dumps(finite(value), ensure_ascii=False, default=str), file=stream)


@contextmanager
def json_alone(as_json: bool) -> Iterator[TextIO | None]:
    """The stream for JSON; inside, whatever else is printed to stdout goes to stderr.

    That is what rules, environments, losses and other functions of the user's own print, in any thread, what libraries
    print, and what processes print that they start.  None, and nothing is changed, where no JSON was asked for.
    """
    if not as_json:
        yield None
        return
    stdout = sys.stdout
    try:
        number, to = stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):  # a stream without a file behind it
        with redirect_stdout(sys.stderr):
            yield stdout
        return
    stdout.flush()
    stream = os.fdopen(os.dup(number), "w", encoding=stdout.encoding, errors=stdout.errors)
    os.dup2(to, number)
    try:
        with redirect_stdout(sys.stderr):
            yield stream
    finally:
        stdout.flush()
        os.dup2(stream.fileno(), number)
        with suppress(BrokenPipeError):
            stream.close()


def finite(value: Any) -> Any:
    """The same value with every float that is not finite replaced by None, which JSON can hold."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def show(renderable: RenderableType) -> None:
    """Print a rich table on a terminal."""
    from rich.console import Console

    Console().print(renderable)


def require_run(folder: Path) -> Path:
    """The folder of a run, or a CheckpointError with the closest sibling."""
    if (folder / "config.yaml").is_file():
        return folder
    parent = folder.parent
    siblings = [p.name for p in parent.iterdir() if (p / "config.yaml").is_file()] if parent.is_dir() else []
    state = "has no config.yaml, so it is not a run folder." if folder.is_dir() else "does not exist."
    raise CheckpointError(
        f"{folder} {state}{closest(folder.name, siblings)}", fix="name the folder of a run, such as runs/demo"
    )


@contextmanager
def interruptible(output_dir: Path, resumed: Path | None = None) -> Iterator[None]:
    """Ctrl-C inside says which run folder was left behind and how to go on, and exits with 130; an error says it too.

    The run's folder is `resumed`, or the folder that appeared under `output_dir` meanwhile.
    """
    before = _folders(output_dir)
    try:
        yield
    except TutelageError as error:
        for folder in sorted(_folders(output_dir) - before):
            error.add_note(_how_to_go_on(folder))
        raise
    except KeyboardInterrupt as stop:
        made = [resumed] if resumed else sorted(_folders(output_dir) - before)
        typer.echo("", err=True)
        if not made:
            typer.echo("Stopped before a run folder was made.", err=True)
        for folder in made:
            typer.echo(f"Stopped. {_how_to_go_on(folder)}", err=True)
        raise typer.Exit(INTERRUPTED) from stop


def _folders(parent: Path) -> set[Path]:
    return {p for p in parent.iterdir() if p.is_dir()} if parent.is_dir() else set()


def _how_to_go_on(folder: Path) -> str:
    saved = sorted(p.name for p in (folder / "checkpoints").glob("step_*"))
    if saved:
        return f"The run is in {folder}, its last checkpoint is {saved[-1]}. Go on with: tutelage resume {folder}"
    return f"The run is in {folder}, without a checkpoint yet (checkpoint.every=N writes them while training)."
