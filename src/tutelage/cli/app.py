"""The commands by name. Each lives in a module of its own and imports what is heavy when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from tutelage.cli import doctor, models, recipes, runs
from tutelage.cli.console import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Train language models from human and AI feedback.",
)


def _version(asked: bool) -> None:
    if asked:
        from tutelage import __version__

        typer.echo(f"tutelage {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; works anywhere.")] = False,
) -> None:
    pass


app.command("demo")(runs.demo)
app.command("run", add_help_option=False)(runs.run)
app.command("resume")(runs.resume)
app.command("check")(runs.check)
app.add_typer(recipes.app, name="recipes")
app.command("report")(runs.report)
app.command("chat")(models.chat)
app.command("doctor")(doctor.doctor)
app.command("export")(models.export)
