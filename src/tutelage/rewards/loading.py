"""From the name of a rule in a recipe to its function.  Torch-free: a rule's own process starts with this.

A rule is named as

    exact_match                        a built-in rule (`rewards.library`)
    length_range(low=5, high=60)       a built-in rule with settings
    my_package.rules:polite            a function of yours (`rewards.calls` says what it is called with)
    rules.py:polite                    the same, from a file beside the recipe
    rules.py:shorter_than(words=40)    a function that takes the settings and returns such a function

Settings are keyword arguments with literal values, or a mapping beside the name; nothing else in a name is evaluated.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tutelage.errors import RewardError, TutelageError, closest
from tutelage.rewards.library import BUILTIN_RULES

Rule = Callable[..., Any]


def load_rule(spec: str, folder: Path | None = None, settings: Mapping[str, Any] | None = None) -> Rule:
    """The rule that a recipe names.  folder: file paths are taken from it; default: the working directory.

    Raises RewardError saying which part of the name is wrong, and MissingExtraError where a package is.
    """
    target, in_brackets = _parse(spec)
    if settings and in_brackets is not None:
        raise RewardError(
            f"reward rule {spec!r} has settings in brackets and beside its name", fix="give all of them in one place"
        )
    given = dict(settings) if settings else in_brackets
    place, colon, attribute = target.rpartition(":")
    if not colon:
        if target not in BUILTIN_RULES:
            hint = closest(target, BUILTIN_RULES) or f" Built in are {', '.join(BUILTIN_RULES)}."
            raise RewardError(
                f"reward rule {spec!r} is neither built in nor of the form module:function.{hint}",
                fix="name a built-in rule, module:function, or file.py:function",
            )
        return _built(BUILTIN_RULES[target], given or {}, spec)
    module = _load_file(place, spec, folder) if place.endswith(".py") else _load_module(place, spec)
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        what = "holds no function" if function is None else f"holds a {type(function).__name__}, not a function,"
        raise RewardError(
            f"reward rule {spec!r}: {place} {what} named {attribute!r}.{closest(attribute, known)}",
            fix="name a function that takes (prompts, responses, truths)",
        )
    return function if given is None else _built(function, given, spec)


def name_of(spec: str) -> str:
    """`polite` of `rules.py:polite(words=3)`."""
    return spec.partition("(")[0].rpartition(":")[2].strip()


def _parse(spec: str) -> tuple[str, dict[str, Any] | None]:
    """`name(key=literal, ...)` -> name, settings; settings are None where there are no brackets."""
    target, bracket, rest = spec.strip().partition("(")
    if not bracket:
        return target.strip(), None
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("only key=value settings are allowed")
        return target.strip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise RewardError(
            f"reward rule {spec!r} cannot be read: {error}", fix="write it as name(key=value, other='text')"
        ) from error


def _built(factory: Callable[..., Rule], settings: dict[str, Any], spec: str) -> Rule:
    try:
        rule = factory(**settings)
    except TutelageError:
        raise
    except Exception as error:
        raise RewardError(
            f"reward rule {spec!r} could not be made: {type(error).__name__}: {error}",
            fix="give it the settings that its function takes",
        ) from error
    if not callable(rule):
        raise RewardError(
            f"reward rule {spec!r} made a {type(rule).__name__}, not a function",
            fix="drop the brackets, or return a function that takes (prompts, responses, truths)",
        )
    return rule


def _load_file(place: str, spec: str, folder: Path | None) -> ModuleType:
    path = ((folder or Path.cwd()) / Path(place).expanduser()).resolve()
    if not path.is_file():
        raise RewardError(f"reward rule {spec!r}: there is no file {path}", fix="give a path from the recipe's folder")
    name = f"tutelage_rule_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    source = importlib.util.spec_from_file_location(name, path)
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    sys.modules[name] = module
    try:
        source.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failed(spec, str(path), error) from error
    return module


def _load_module(place: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise _import_failed(spec, place, error) from error


def _import_failed(spec: str, place: str, error: Exception) -> RewardError:
    return RewardError(
        f"reward rule {spec!r}: importing {place} failed: {type(error).__name__}: {error}",
        fix="install the module or correct its name; a file is named as path/to/file.py:function",
    )
