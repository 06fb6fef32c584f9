"""demo, run, resume, check, report: what makes run folders and looks at them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from tutelage.cli.console import display_of, echo_json, interruptible, json_alone, require_run, warn

if TYPE_CHECKING:
    from tutelage.build import RunResult

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, one object a line.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines instead of a live display.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to change, as key=value.", metavar="[a.b=c]...")]


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the runs and the report.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Keys all randomness.", min=0)] = 0,
    as_json: Json = False,
    plain: Plain = False,
) -> None:
    """The three stages on a bundled task, minutes on a CPU; ends in a report."""
    from tutelage.cli.demo import run_demo

    try:
        with json_alone(as_json) as stream:
            run_demo(folder, seed, display_of(as_json, plain), stream)
    except KeyboardInterrupt as stop:
        typer.echo(f"\nStopped. What was finished is in {folder}; start again with: tutelage demo", err=True)
        raise typer.Exit(130) from stop


def run(
    ctx: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe file, or the name of a shipped one.", metavar="RECIPE")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    plain: Plain = False,
    show_help: Annotated[
        bool, typer.Option("--help", "-h", help="This, and every setting of RECIPE (without one: of every algorithm).")
    ] = False,
) -> None:
    """Train what a recipe describes."""
    if show_help:
        _run_help(ctx, recipe, overrides or [])
        return
    if recipe is None:
        raise typer.BadParameter("name a recipe; `tutelage recipes` lists the shipped ones", ctx=ctx)
    from tutelage.config import load_checked

    loaded, warnings = load_checked(recipe, overrides or [])
    warn(warnings)
    with json_alone(as_json) as stream:
        from tutelage.build import run_recipe

        with interruptible(Path(loaded.config.output_dir)):
            result = run_recipe(loaded, display=display_of(as_json, plain), stream=stream)
        _finish(result, stream)


def _run_help(ctx: typer.Context, recipe: str | None, overrides: list[str]) -> None:
    from tutelage.config import SCHEMAS, load_recipe
    from tutelage.config.describe import keys_text

    typer.echo(ctx.get_help())
    if recipe is not None:
        loaded = load_recipe(recipe, overrides)
        typer.echo(f"\nSettings of {recipe} (* set by the recipe or an override):\n")
        typer.echo(keys_text(type(loaded.config), loaded.config, loaded.sources))
        return
    for name, schema in SCHEMAS.items():
        typer.echo(f"\nSettings with algorithm={name}: {schema.model_fields['algorithm'].description}\n")
        typer.echo(keys_text(schema))


def resume(
    run: Annotated[
        str, typer.Argument(help="The folder of a run, or the address of its copy (checkpoint.mirror).", metavar="RUN")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Another cluster to go on with; other settings stay.", metavar="[cluster.a=b]..."),
    ] = None,
    as_json: Json = False,
    plain: Plain = False,
) -> None:
    """Go on with a run from its last checkpoint."""
    folder = _fetched(run) if "://" in run else Path(run)
    require_run(folder)
    with json_alone(as_json) as stream:
        from tutelage.build import resume_run

        with interruptible(folder.parent, resumed=folder):
            result = resume_run(folder, display=display_of(as_json, plain), overrides=overrides or [], stream=stream)
        _finish(result, stream)


def _fetched(url: str) -> Path:
    """A run folder below ./runs, made from a copy in an object store."""
    from tutelage.mirror import fetch

    folder = fetch(url, Path("runs"))
    typer.echo(f"fetched {url} to {folder}", err=True)
    return folder


def _finish(result: RunResult, stream: TextIO | None) -> None:
    """stream: where JSON goes that was asked for."""
    page = result.folder / "report.html"
    report_path = str(page) if page.is_file() else None
    if stream is not None:
        echo_json({"folder": str(result.folder), "report": report_path, "summary": result.summary}, stream)
        return
    typer.echo(f"run folder: {result.folder}")
    if report_path:
        typer.echo(f"report: {report_path}")


def check(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.", metavar="RECIPE")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Every name, row, length, reward and divisibility, before a model loads."""
    from tutelage.config import load_checked

    loaded, warnings = load_checked(recipe, overrides or [])
    with json_alone(as_json) as stream:
        from tutelage.build import check_recipe

        lines = check_recipe(loaded)
        if as_json:
            echo_json({"ok": True, "warnings": warnings, "lines": lines}, stream)
            return
    warn(warnings)
    for line in lines:
        typer.echo(line)


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN")],
    as_json: Json = False,
) -> None:
    """Draw the figures of a run again and write its report.html."""
    require_run(folder)
    from tutelage.reports.html import write_report

    path = write_report(folder)
    if as_json:
        echo_json({"report": str(path)})
    else:
        typer.echo(f"report: {path}")
