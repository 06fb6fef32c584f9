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

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tutelage.errors import RewardError, TutelageError, closest
from tutelage.named import load_named, parse_spec
from tutelage.rewards.library import BUILTIN_RULES

Rule = Callable[..., Any]
REWARD_RULE = "reward rule"


def load_rule(
    spec: str, folder: Path | None = None, settings: Mapping[str, Any] | None = None, what: str = REWARD_RULE
) -> Rule:
    """The rule that a recipe names.  folder: file paths are taken from it; default: the working directory.

    what: how messages call it.  Raises RewardError saying which part of the name is wrong, and MissingExtraError where
    a package is.
    """
    target, in_brackets = parse_spec(spec, what, RewardError)
    if settings and in_brackets is not None:
        raise RewardError(
            f"{what} {spec!r} has settings in brackets and beside its name", fix="give all of them in one place"
        )
    given = dict(settings) if settings else in_brackets
    if ":" not in target:
        if target not in BUILTIN_RULES:
            hint = closest(target, BUILTIN_RULES) or f" Built in are {', '.join(BUILTIN_RULES)}."
            raise RewardError(
                f"{what} {spec!r} is neither built in nor of the form module:function.{hint}",
                fix="name a built-in rule, module:function, or file.py:function",
            )
        return _built(BUILTIN_RULES[target], given or {}, spec, what)
    function = load_named(target, what, folder, RewardError)
    if not callable(function):
        raise RewardError(f"{what} {spec!r} is a {type(function).__name__}, not a function", fix="name a function")
    return function if given is None else _built(function, given, spec, what)


def name_of(spec: str) -> str:
    """`polite` of `rules.py:polite(words=3)`."""
    return spec.partition("(")[0].rpartition(":")[2].strip()


def _built(factory: Callable[..., Rule], settings: dict[str, Any], spec: str, what: str) -> Rule:
    try:
        rule = factory(**settings)
    except TutelageError:
        raise
    except Exception as error:
        raise RewardError(
            f"{what} {spec!r} could not be made: {type(error).__name__}: {error}",
            fix="give it the settings that its function takes",
        ) from error
    if not callable(rule):
        raise RewardError(
            f"{what} {spec!r} made a {type(rule).__name__}, not a function",
            fix="drop the brackets, or return the function that is to be called with the responses",
        )
    return rule
