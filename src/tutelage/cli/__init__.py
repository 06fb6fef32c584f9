"""The `tutelage` command. Nothing here imports torch before a command that needs it runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `tutelage` command."""
    from tutelage.cli.app import app

    app(prog_name="tutelage")
