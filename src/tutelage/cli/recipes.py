"""recipes: what is shipped, and every setting of a recipe beside its default."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tutelage.cli.console import echo_json, show

app = typer.Typer(rich_markup_mode=None, help="List the shipped recipes, or show one.")


@app.callback(invoke_without_command=True)
def list_recipes(ctx: typer.Context) -> None:
    """List the shipped recipes, or show one."""
    if ctx.invoked_subcommand is not None:
        return
    from tutelage.config import shipped_recipes

    for name, path in shipped_recipes().items():
        text = path.read_text(encoding="utf-8")
        comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        typer.echo(f"{name:<24}{comments[0] if comments else ''}".rstrip())
    typer.echo("\n`tutelage recipes show NAME` prints every setting of one.")


@app.command("show")
def show_recipe(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.", metavar="NAME")],
    overrides: Annotated[list[str] | None, typer.Argument(help="As for `run`.", metavar="[a.b=c]...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line per setting.")] = False,
) -> None:
    """Every setting of a recipe with its value, default and meaning; `*` marks what the recipe sets."""
    from tutelage.config import load_recipe
    from tutelage.config.describe import keys_table, keys_text, value_at, walk

    loaded = load_recipe(recipe, overrides or [])
    schema = type(loaded.config)
    if as_json:
        values = loaded.config.model_dump(mode="json")
        sources = {name: str(source) for name, source in loaded.sources.items()}
        echo_json({"recipe": str(loaded.recipe_path), "config": values, "set": sources})
    elif plain or not sys.stdout.isatty():
        typer.echo(keys_text(schema, loaded.config, loaded.sources))
    else:
        show(keys_table(schema, loaded.config, loaded.sources))
        unset = sum(value_at(loaded.config, k.name) == k.default for k in walk(schema) if "[]" not in k.name)
        typer.echo(f"* set by the recipe or an override; {unset} settings are at their default")
