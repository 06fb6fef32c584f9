"""Python objects that a recipe names: `module:name`, or `file.py:name`, and settings written as name(key=value)."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tutelage.errors import ConfigError, TutelageError, closest


def load_named(spec: str, what: str, folder: Path | None = None, error: type[TutelageError] = ConfigError) -> Any:
    """The object that `spec` names.  Importing a module runs it: load names of recipes that you trust.

    what: how messages call it, such as "reward rule".  folder: where a relative file is looked for; default: the
    working directory.  Raises `error` that says which part of the name is wrong.
    """
    place, colon, attribute = spec.strip().rpartition(":")
    if not colon or not place or not attribute:
        raise error(f"{what} {spec!r} names no object", fix="write it as module:name or file.py:name")
    module = _loaded(place, spec, what, folder, error)
    found = getattr(module, attribute, None)
    if found is None:
        known = [name for name in vars(module) if not name.startswith("_")]
        raise error(
            f"{what} {spec!r}: {place} holds nothing named {attribute!r}.{closest(attribute, known)}",
            fix="correct the name after the colon",
        )
    return found


def parse_spec(spec: str, what: str, error: type[TutelageError] = ConfigError) -> tuple[str, dict[str, Any] | None]:
    """`name(key=literal, ...)` -> name, settings; None where there are no brackets.  Nothing else is evaluated.

    Raises `error` for brackets that hold anything but keyword arguments with literal values.
    """
    target, bracket, rest = spec.strip().partition("(")
    if not bracket:
        return target.strip(), None
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("only key=value settings are allowed")
        return target.strip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as problem:
        raise error(
            f"{what} {spec!r} cannot be read: {problem}", fix="write it as name(key=value, other='text')"
        ) from problem


def load_function(spec: str, what: str) -> Callable[..., Any]:
    """A function that a recipe names; what it raises when it is called arrives as a ConfigError that names it.

    Raises ConfigError as `load_named`, and for an object that cannot be called.
    """
    function = load_named(spec, what)
    if not callable(function):
        raise ConfigError(f"{what} {spec!r} is a {type(function).__name__}", fix="name a function")

    @functools.wraps(function)
    def guarded(*arguments: Any, **settings: Any) -> Any:
        try:
            return function(*arguments, **settings)
        except TutelageError:
            raise
        except Exception as problem:
            raise ConfigError(
                f"{what} {spec} failed: {type(problem).__name__}: {problem}", fix="correct it; --debug shows where"
            ) from problem

    return guarded


def load_module(spec: str, what: str, folder: Path | None = None, error: type[TutelageError] = ConfigError) -> Any:
    """The module, `module` or `file.py`; with a name after a colon what it holds.  The rest as `load_named`."""
    if ":" in spec:
        return load_named(spec, what, folder, error)
    return _loaded(spec.strip(), spec, what, folder, error)


def _loaded(place: str, spec: str, what: str, folder: Path | None, error: type[TutelageError]) -> ModuleType:
    return _file(place, spec, what, folder, error) if place.endswith(".py") else _module(place, spec, what, error)


def _file(place: str, spec: str, what: str, folder: Path | None, error: type[TutelageError]) -> ModuleType:
    path = ((folder or Path.cwd()) / Path(place).expanduser()).resolve()
    if not path.is_file():
        raise error(f"{what} {spec!r}: there is no file {path}", fix="give a path from the recipe's folder")
    name = f"tutelage_file_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    source = importlib.util.spec_from_file_location(name, path)
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    sys.modules[name] = module
    try:
        source.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        raise _failed(spec, what, str(path), problem, error) from problem
    return module


def _module(place: str, spec: str, what: str, error: type[TutelageError]) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as problem:
        raise _failed(spec, what, place, problem, error) from problem


def _failed(spec: str, what: str, place: str, problem: Exception, error: type[TutelageError]) -> TutelageError:
    return error(
        f"{what} {spec!r}: importing {place} failed: {type(problem).__name__}: {problem}",
        fix="install the module or correct its name; a file is named as path/to/file.py:name",
    )
