"""Rule rewards: user functions and built-in rules, named in a recipe, called on whole batches, checked row by row.

Shapes: B sequences.

A rule is named as

    exact_match                        a built-in rule (`rewards.builtin`)
    length_range(low=5, high=60)       a built-in rule with settings
    my_package.rules:polite            a function that takes (prompts, responses, truths) and returns one float each
    rules.py:polite                    the same, from a file beside the recipe
    rules.py:shorter_than(words=40)    a function that takes the settings and returns such a function

Settings are keyword arguments with literal values; nothing else in a name is evaluated.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import RewardError, closest
from tutelage.protocols import RewardRule
from tutelage.rewards.builtin import BUILTIN_RULES
from tutelage.rewards.checks import prompt_text, require_scores, row_name
from tutelage.types import Rollout


class RuleSource:
    """A rule as a reward source.

    spec: see above; file paths are taken from `folder` (default: the working directory). name: default the function's.
    Raises RewardError when the rule cannot be loaded; `score` raises it, naming the rule, the row and the value, when
    the rule raises, returns the wrong number of scores, or one that is not a finite number.
    """

    def __init__(self, spec: str, *, name: str | None = None, folder: Path | None = None) -> None:
        self.spec = spec
        self.rule = load_rule(spec, folder)
        self.name = name or spec.partition("(")[0].rpartition(":")[2].strip()

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32. The rule sees the prompts' text, the responses without special tokens, and the truths."""
        columns = ([prompt_text(m) for m in rollout.messages], list(rollout.texts), list(rollout.truths))
        try:
            result = self.rule(*columns)
        except Exception as error:
            raise self._raised(error, columns, rollout) from error
        values = self._values(result, rollout)
        fix = f"make {self.spec} return a finite number for every response, also an empty or odd one"
        return require_scores(torch.tensor(values, dtype=torch.float64), rollout, f"reward rule {self.spec}", fix)

    def _values(self, result: Any, rollout: Rollout) -> list[float]:
        values = result.tolist() if hasattr(result, "tolist") else result
        fix = f"make {self.spec} return a list with one float per response, in their order"
        if isinstance(values, str | bytes | dict | set) or not isinstance(values, Sequence):
            raise RewardError(f"reward rule {self.spec} returned a {type(result).__name__}: {_short(result)}", fix=fix)
        if len(values) != len(rollout):
            raise RewardError(
                f"reward rule {self.spec} returned {len(values)} scores for {len(rollout)} responses", fix=fix
            )
        for row, value in enumerate(values):
            if not isinstance(value, Real):
                raise RewardError(
                    f"reward rule {self.spec} returned {_short(value)}, a {type(value).__name__}, "
                    f"for {row_name(rollout, row)}",
                    fix=fix,
                )
        return [float(value) for value in values]

    def _raised(self, error: Exception, columns: tuple[list[Any], ...], rollout: Rollout) -> RewardError:
        """The error of the rule, with the first row on which it fails by itself."""
        where = f"a batch of {len(rollout)} responses"
        for row in range(len(rollout)):
            try:
                self.rule(*([column[row]] for column in columns))
            except Exception as alone:
                where, error = row_name(rollout, row), alone
                break
        detail = getattr(error, "what", None) or f"{type(error).__name__}: {error}"
        fix = getattr(error, "fix", "") or f"correct {self.spec}; it must accept every response, also an empty one"
        return RewardError(f"reward rule {self.spec} failed on {where}: {detail}", fix=fix)


def load_rule(spec: str, folder: Path | None = None) -> RewardRule:
    """The rule that a recipe names. Raises RewardError saying which part of the name is wrong."""
    target, settings = _parse(spec)
    place, colon, attribute = target.rpartition(":")
    if not colon:
        if target not in BUILTIN_RULES:
            hint = closest(target, BUILTIN_RULES) or f" Built in are {', '.join(BUILTIN_RULES)}."
            raise RewardError(
                f"reward rule {spec!r} is neither built in nor of the form module:function.{hint}",
                fix="name a built-in rule, module:function, or file.py:function",
            )
        return _built(BUILTIN_RULES[target], settings or {}, spec)
    module = _load_file(place, spec, folder) if place.endswith(".py") else _load_module(place, spec)
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        what = "holds no function" if function is None else f"holds a {type(function).__name__}, not a function,"
        raise RewardError(
            f"reward rule {spec!r}: {place} {what} named {attribute!r}.{closest(attribute, known)}",
            fix="name a function that takes (prompts, responses, truths)",
        )
    return function if settings is None else _built(function, settings, spec)


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


def _built(factory: Callable[..., RewardRule], settings: dict[str, Any], spec: str) -> RewardRule:
    try:
        rule = factory(**settings)
    except RewardError:
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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
