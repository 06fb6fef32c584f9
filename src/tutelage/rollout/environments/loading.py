"""Environments that a recipe names: built in, a module's, or from a file; each with settings.

    calculator                          a built-in one (`rollout.environments.builtin`)
    number_guessing(high=20)            with settings
    my_package.worlds:Maze              a class, or a function that returns an environment
    worlds.py:Maze(size=5)              from a file beside the recipe, with settings

Settings are keyword arguments with literal values; nothing else in a name is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tutelage.errors import ConfigError, closest
from tutelage.named import load_named, parse_spec
from tutelage.rollout.environments.builtin import BUILT_IN
from tutelage.rollout.environments.driver import Factory


def load_environments(functions: Mapping[str, str], folder: Path | None = None) -> dict[str, Factory]:
    """Name -> factory, each tried once.  Raises ConfigError that says which part of which one is wrong."""
    return {name: load_environment(name, spec, folder) for name, spec in functions.items()}


def load_environment(name: str, spec: str, folder: Path | None = None) -> Factory:
    """The factory that `spec` names with its settings.  Importing a module runs it: load what you trust."""
    what = f"environment.functions.{name}"
    target, settings = parse_spec(spec, what)
    maker: Callable[..., Any]
    if ":" in target:
        maker = load_named(target, what, folder)
    elif target in BUILT_IN:
        maker = BUILT_IN[target]
    else:
        raise ConfigError(
            f"{what} is {spec!r}, which is neither built in nor of the form module:factory."
            + (closest(target, BUILT_IN) or f" Built in are {', '.join(BUILT_IN)}."),
            fix="name a built-in environment, module:factory, or file.py:factory",
        )
    factory = partial(maker, **(settings or {}))
    try:
        made = factory()
    except Exception as error:
        said = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
        fix = getattr(error, "fix", "") or "give it the settings that its factory takes; it is called with no others"
        raise ConfigError(f"{what}: {spec!r} cannot be made: {said}", fix=fix) from error
    missing = [method for method in ("reset", "step") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(
            f"{what}: {spec!r} made a {type(made).__name__} without {' and '.join(missing)}",
            fix="return an object with reset(messages, truth, seed) and step(tokens, text)",
        )
    return factory
