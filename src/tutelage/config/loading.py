"""From a recipe and `a.b=c` overrides to a validated config; every problem of one load is reported together.

A message names the full key, the value, the recipe line or the override, and the closest known key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from tutelage.config import describe, recipe_yaml
from tutelage.config.checks import check_effect, check_sense
from tutelage.config.hints import unknown_key
from tutelage.config.schema import Schema
from tutelage.config.stages import SCHEMAS, AnyConfig
from tutelage.errors import ConfigError, closest


@dataclass(frozen=True)
class Source:
    """Where a value was set: a line of the recipe, or the text of an override."""

    file: str = ""
    line: int = 0
    override: str = ""

    def __str__(self) -> str:
        if self.override:
            return f"override {self.override}"
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Loaded:
    """A recipe with its overrides applied.

    raw      the nested mapping before defaults.   sources  full dotted key of every value that was set -> where.
    """

    config: AnyConfig
    raw: dict[str, Any]
    sources: dict[str, Source]
    recipe_path: Path


@dataclass
class _Draft:
    """Values by full key while loading, where each was set, and what is wrong so far."""

    shown: str
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def shipped_recipes() -> dict[str, Path]:
    """Name of every recipe in the package -> its file."""
    folder: Traversable = resources.files("tutelage") / "recipes"
    if not folder.is_dir():
        return {}
    names = [item.name for item in folder.iterdir() if item.name.endswith(".yaml")]
    return {name.removesuffix(".yaml"): Path(str(folder / name)) for name in sorted(names)}


def find_recipe(path_or_name: str) -> Path:
    """A recipe file by its path or by the name of a shipped recipe. Raises ConfigError with the closest name."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if path_or_name in shipped:
        return shipped[path_or_name]
    known = ", ".join(shipped) or "none"
    what = f"{path_or_name} is a folder, not a recipe file." if path.is_dir() else f"there is no recipe {path_or_name}."
    hint = closest(path.stem, shipped)
    raise ConfigError(f"{what}{hint}", fix=f"give the path of a YAML file, or one of the shipped recipes: {known}")


def load_recipe(path_or_name: str, overrides: Sequence[str] = ()) -> Loaded:
    """Read, override and validate a recipe.

    Raises ConfigError naming everything that is wrong: syntax, duplicate or unknown keys, types, ranges, missing keys.
    Whether each key has an effect, and whether they make sense together, is `checks.check_effect` and `check_sense`.
    """
    path = find_recipe(path_or_name)
    draft = _Draft(_shown(path))
    tree = _read(path, draft)
    given = _parse_overrides(overrides, draft)
    schema = _schema_of(tree.value, given, draft)
    for name, value in tree.value.items():
        _place(schema, str(name), value, draft, (str(name),), tree.lines, None)
    for name, (value, text) in given.items():
        _place(schema, name, _as_text(schema, name, value, text), draft, (), {}, text)
    raw = _nested(draft.values)
    config = _validated(schema, raw, draft)
    if config is None or draft.problems:
        raise _error(draft)
    return Loaded(config, raw, draft.sources, path)


def _shown(path: Path) -> str:
    """A short way to say where a recipe is: relative to the working folder, or recipes/NAME.yaml when shipped."""
    if path.is_relative_to(Path(str(resources.files("tutelage")))):
        return f"recipes/{path.name}"
    resolved, here = path.resolve(), Path.cwd().resolve()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(path)


def _error(draft: _Draft) -> ConfigError:
    problems = list(dict.fromkeys(draft.problems))
    if len(problems) == 1:
        return ConfigError(problems[0])
    listing = "".join(f"\n  - {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems in {draft.shown}:{listing}")


def _read(path: Path, draft: _Draft) -> recipe_yaml.Document:
    try:
        tree = recipe_yaml.parse(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        problem, line = recipe_yaml.problem_of(error)
        where = f"{draft.shown}:{line}" if line else draft.shown
        raise ConfigError(f"{where} is not YAML that can be read: {problem}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{draft.shown} cannot be read: {error}") from error
    if not isinstance(tree.value, dict):
        got = "is empty" if tree.value is None else f"holds {describe.value_text(tree.value)}"
        raise ConfigError(f"{draft.shown} {got}; a recipe is a mapping of settings", fix="start with `algorithm: ...`")
    for name, first, second in tree.duplicates:
        draft.problems.append(f"{name} is set twice ({draft.shown}:{first} and {draft.shown}:{second})")
    return tree


def _parse_overrides(overrides: Sequence[str], draft: _Draft) -> dict[str, tuple[Any, str]]:
    given: dict[str, tuple[Any, str]] = {}
    for text in overrides:
        name, equals, raw_value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            draft.problems.append(f"override {text} is not of the form key=value")
            continue
        if name in given:
            draft.problems.append(f"{name} is set twice (override {given[name][1]} and override {text})")
        try:
            given[name] = (recipe_yaml.parse_value(raw_value), text)
        except yaml.YAMLError as error:
            draft.problems.append(f"override {text}: the value cannot be read ({recipe_yaml.problem_of(error)[0]})")
    return given


def _schema_of(tree: Mapping[str, Any], given: Mapping[str, tuple[Any, str]], draft: _Draft) -> type[AnyConfig]:
    name = given["algorithm"][0] if "algorithm" in given else tree.get("algorithm")
    if isinstance(name, str) and name in SCHEMAS:
        return SCHEMAS[name]
    known = ", ".join(SCHEMAS)
    if name is None:
        draft.problems.append(f"algorithm is required and {draft.shown} does not set it; known: {known}")
    else:
        hint = closest(str(name), SCHEMAS)
        draft.problems.append(
            f"algorithm {describe.value_text(name)} is not known ({draft.shown}).{hint} Known: {known}"
        )
    raise _error(draft)


def _fields(schema: type[Schema], name: str) -> Any:
    """The annotation at a full key: a section class, a setting's type, or None where there is no such key."""
    annotation: Any = schema
    for part in name.split("."):
        section = describe.section_of(annotation)
        if section is None:
            if annotation is Any:
                return Any
            if get_origin(annotation) is not dict:
                return None
            annotation = get_args(annotation)[1]
            continue
        if part not in section.model_fields:
            return None
        annotation = section.model_fields[part].annotation
    return annotation


def _place(
    schema: type[Schema],
    name: str,
    value: Any,
    draft: _Draft,
    path: tuple[str, ...],
    lines: Mapping[tuple[str, ...], int],
    override: str | None,
) -> None:
    """Put one value, or every value of a section, under its full key; an unknown key becomes a problem."""
    source = Source(override=override) if override else Source(draft.shown, lines.get(path, 0))
    annotation = _fields(schema, name)
    section = describe.section_of(annotation)
    if annotation is None or (path and len(path) == 1 and "." in name):
        nested = annotation is not None
        draft.problems.append(unknown_key(schema, name, describe.value_text(value), str(source), nested=nested))
    elif section is None and describe.entry_of(annotation) and isinstance(value, dict):
        for key, below in value.items():
            draft.values.setdefault(f"{name}.{key}", {})
            _place(schema, f"{name}.{key}", below, draft, (*path, str(key)) if path else (), lines, override)
    elif section is None:
        draft.values[name] = _integral(annotation, value)
        draft.sources[name] = source
        if describe.entry_of(annotation) and isinstance(value, list):
            _check_entries(schema, name, value, draft, source, path, lines)
    elif isinstance(value, dict):
        for key, below in value.items():
            _place(schema, f"{name}.{key}", below, draft, (*path, str(key)) if path else (), lines, override)
    elif value is not None:
        keys = ", ".join(section.model_fields)
        draft.problems.append(
            f"{name} is a section with the keys {keys}, not one value ({source}, value {describe.value_text(value)})"
        )


def _check_entries(
    schema: type[Schema],
    name: str,
    entries: list[Any],
    draft: _Draft,
    source: Source,
    path: tuple[str, ...],
    lines: Mapping[tuple[str, ...], int],
) -> None:
    entry = describe.entry_of(_fields(schema, name))
    assert entry is not None
    for index, item in enumerate(entries):
        for key in [k for k in item if k not in entry.model_fields] if isinstance(item, dict) else []:
            line = lines.get((*path, str(index), str(key)))
            where = Source(source.file, line) if line else source
            full = f"{name}[{index}].{key}"
            hint = closest(str(key), entry.model_fields).replace("mean ", f"mean {name}[{index}].")
            value = describe.value_text(item[key])
            draft.problems.append(f"{full} is not a setting ({where}, value {value}).{hint}")


def _integral(annotation: Any, value: Any) -> Any:
    """`1e4` for an integer setting is 10000."""
    wants = describe.base_types(annotation)
    if isinstance(value, float) and value.is_integer() and int in wants and float not in wants:
        return int(value)
    return value


def _as_text(schema: type[Schema], name: str, value: Any, text: str) -> Any:
    """A text setting takes what was typed in an override: `name=12` is the text 12."""
    wants = describe.base_types(_fields(schema, name))
    if str in wants and isinstance(value, bool | int | float):
        return text.partition("=")[2].strip()
    return value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        level = raw
        for part in above:
            level = level.setdefault(part, {})
        level[last] = value
    return raw


def _with_sections(schema: type[Schema], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Required sections that are missing become empty ones, so that the missing keys themselves are named."""
    full = dict(raw)
    for name, info in schema.model_fields.items():
        section = describe.section_of(info.annotation)
        if section and (name in full or info.is_required()):
            full[name] = _with_sections(section, full.get(name, {}))
    return full


def _validated(schema: type[AnyConfig], raw: Mapping[str, Any], draft: _Draft) -> AnyConfig | None:
    try:
        return schema.model_validate(_with_sections(schema, raw), strict=True)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            if item["type"] != "extra_forbidden":
                draft.problems.append(_invalid(schema, dict(item), draft))
        return None


def _invalid(schema: type[Schema], item: dict[str, Any], draft: _Draft) -> str:
    location = [str(part) for part in item["loc"]]
    name = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(location))
    if item["type"] == "missing":
        return f"{name} is required and is not set ({draft.shown})"
    source = next((draft.sources[k] for k in _prefixes(location) if k in draft.sources), None)
    where = str(source) if source else draft.shown
    must = str(item["msg"]).replace("Input should be ", "must be ").replace("Input should have ", "must have ")
    value = item["input"]
    hint = ""
    if item["type"] == "literal_error":
        annotation = next((a for k in _prefixes(location) if (a := _fields(schema, k)) is not None), None)
        hint = closest(str(value), _choices(annotation))
    if item["type"] == "string_type" and isinstance(value, bool | int | float):
        hint = f' Write it in quotes: "{value}"'
    return f"{name} {must} ({where}, value {describe.value_text(value)}).{hint}"


def _prefixes(location: Sequence[str]) -> Iterable[str]:
    return (".".join(location[:end]) for end in range(len(location), 0, -1))


def _choices(annotation: Any) -> list[str]:
    found: list[str] = []
    for part in get_args(annotation):
        found += [part] if isinstance(part, str) else _choices(part)
    return found


def load_checked(path_or_name: str, overrides: Sequence[str] = ()) -> tuple[Loaded, list[str]]:
    """Load a recipe, refuse keys without effect and combinations that cannot work; returns it and the warnings."""
    loaded = load_recipe(path_or_name, overrides)
    check_effect(loaded)
    return loaded, check_sense(loaded.config, loaded.sources)


def load_resolved(path: Path) -> AnyConfig:
    """The config of a run folder, as `dump_config` wrote it. Raises ConfigError when it is missing or damaged."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", fix="name the folder of a run, such as runs/demo")
    return load_recipe(str(path)).config


def dump_config(config: AnyConfig) -> str:
    """The resolved config as YAML that `load_recipe` reads back equal.

    Every setting is written, except those at their default whose condition is false in this run.
    """
    values = {}
    for key in describe.walk(type(config)):
        if "[]" in key.name:
            continue
        value = describe.value_at(config, key.name)
        idle = key.condition is not None and not key.condition.holds(config) and value == key.default
        if not idle:
            values[key.name] = _plain(value) if describe.entry_of(key.annotation) else value
    return recipe_yaml.dump(_nested(values))


def _plain(entries: Any) -> Any:
    """The entries of a list or mapping of sections as plain values."""
    if isinstance(entries, dict):
        return {name: entry.model_dump() for name, entry in entries.items()}
    return [entry.model_dump() for entry in entries]
