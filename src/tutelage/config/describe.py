"""Every key of a schema with its meaning, type, default, bounds and condition: for help pages and messages."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tutelage.config.schema import OnlyIf, Schema

if TYPE_CHECKING:
    from rich.table import Table

REQUIRED = "required"
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <="}
_WORDS: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One setting. `name` is the full dotted key; `[]` in it means each entry of a list or mapping."""

    name: str
    meaning: str
    type: str
    default: Any
    required: bool
    bounds: str
    condition: OnlyIf | None
    annotation: Any

    @property
    def default_text(self) -> str:
        return REQUIRED if self.required else value_text(self.default)

    @property
    def kind_text(self) -> str:
        """Type, bounds and condition in one phrase."""
        kind = f"{self.type} {self.bounds}".strip()
        return f"{kind}; only if {self.condition.text}" if self.condition else kind


def value_text(value: Any, limit: int = 80) -> str:
    """A value as it would be written in a recipe, on one line."""
    text = json.dumps(value, ensure_ascii=False, default=lambda v: v.model_dump() if isinstance(v, Schema) else str(v))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def section_of(annotation: Any) -> type[Schema] | None:
    """The schema class when a field is a section, else None."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Schema) else None


def entry_of(annotation: Any) -> type[Schema] | None:
    """The schema class of the entries when a field is a list or a mapping of sections, else None."""
    if get_origin(annotation) in (list, dict):
        return section_of(get_args(annotation)[-1])
    return None


def base_types(annotation: Any) -> set[Any]:
    """The members of a union, or the type itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return set(get_args(annotation))
    return {annotation}


def type_text(annotation: Any) -> str:
    """A type in the words of a recipe."""
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(a) for a in args)
    if origin is Literal:
        return " | ".join(str(a) for a in args)
    if origin is list:
        entry = section_of(args[0])
        return f"list of {{{', '.join(entry.model_fields)}}}" if entry else f"list of {type_text(args[0])}"
    if origin is dict:
        entry = section_of(args[1])
        inside = f"{{{', '.join(entry.model_fields)}}}" if entry else type_text(args[1])
        return f"mapping of {type_text(args[0])} to {inside}"
    return getattr(annotation, "__name__", str(annotation))


def _bounds(info: FieldInfo) -> str:
    parts = []
    for item in info.metadata:
        for attribute, sign in _BOUNDS.items():
            bound = getattr(item, attribute, None)
            if bound is not None:
                parts.append(f"{sign} {bound:g}")
    return ", ".join(parts)


def _key(name: str, info: FieldInfo) -> Key:
    return Key(
        name=name,
        meaning=info.description or "",
        type=type_text(info.annotation),
        default=None if info.is_required() else info.get_default(call_default_factory=True, validated_data={}),
        required=info.is_required(),
        bounds=_bounds(info),
        condition=_condition(info),
        annotation=info.annotation,
    )


def _condition(info: FieldInfo) -> OnlyIf | None:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    condition = extra.get("only_if")
    return condition if isinstance(condition, OnlyIf) else None


def _both(first: OnlyIf | None, second: OnlyIf | None) -> OnlyIf | None:
    if first is None or second is None:
        return first or second
    return OnlyIf(f"{first.text} and {second.text}", lambda c: first.holds(c) and second.holds(c))


def walk(schema: type[Schema], prefix: str = "") -> Iterator[Key]:
    """Every setting below a schema, in the order of the schema; sections themselves are not settings.

    What a section needs, each of its settings needs.
    """
    for field, info in schema.model_fields.items():
        name = f"{prefix}{field}"
        section = section_of(info.annotation)
        if section:
            needed = _condition(info)
            for key in walk(section, f"{name}."):
                yield replace(key, condition=_both(needed, key.condition))
            continue
        yield _key(name, info)
        entry = entry_of(info.annotation)
        if entry:
            yield from walk(entry, f"{name}[].")


def sections(schema: type[Schema], prefix: str = "") -> dict[str, str]:
    """Full name of every section -> its meaning."""
    found: dict[str, str] = {}
    for field, info in schema.model_fields.items():
        section = section_of(info.annotation)
        if section:
            found[f"{prefix}{field}"] = info.description or ""
            found.update(sections(section, f"{prefix}{field}."))
    return found


def mappings(schema: type[Schema]) -> set[str]:
    """Full names of the settings that map names to sections."""
    return {key.name for key in walk(schema) if get_origin(key.annotation) is dict and entry_of(key.annotation)}


def value_at(config: Any, name: str) -> Any:
    """The value of a full dotted key in a validated config."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def keys_text(schema: type[Schema], config: Schema | None = None, sources: Mapping[str, object] | None = None) -> str:
    """One line per setting; with a config also its value, `*` where the user set it and where that was."""
    lines = []
    titles = sections(schema)
    section = None
    for key in walk(schema):
        head = key.name.rpartition(".")[0].removesuffix("[]")
        head = head if head in titles else head.rpartition(".")[0]
        if head != section:
            section = head
            lines.append(f"\n{head}: {titles[head]}" if head in titles else "")
        lines.append(_line(key, config, sources or {}))
    return "\n".join(lines).strip("\n")


def _line(key: Key, config: Schema | None, sources: Mapping[str, object]) -> str:
    if config is None or "[]" in key.name:
        word = key.default_text if key.required else f"default {key.default_text}"
        return f"  {key.name}  ({key.kind_text}; {word})  {key.meaning}"
    value = value_text(value_at(config, key.name))
    if key.name in sources:
        where = f"{sources[key.name]}; {'' if key.required else 'default '}{key.default_text}"
        return f"* {key.name} = {value}  ({where}; {key.kind_text})  {key.meaning}"
    return f"  {key.name} = {value}  (default; {key.kind_text})  {key.meaning}"


def keys_table(
    schema: type[Schema], config: Schema | None = None, sources: Mapping[str, object] | None = None
) -> Table:
    """The same as a rich table. With a config: value and default side by side, set keys in bold with a `*`."""
    from rich.table import Table
    from rich.text import Text

    sources = sources or {}
    table = Table(title=f"{schema.__name__.removesuffix('Config')} settings", title_justify="left", expand=True)
    table.add_column("key", no_wrap=True)
    if config is not None:
        table.add_column("value", overflow="fold", ratio=2)
    table.add_column("default", overflow="fold", ratio=2)
    table.add_column("type", overflow="fold", ratio=3)
    table.add_column("meaning", overflow="fold", ratio=5)
    top = None
    for key in walk(schema):
        head = key.name.split(".")[0] if "." in key.name else ""
        if top is not None and head != top:
            table.add_section()
        top = head
        cells = [key.default_text, key.kind_text, key.meaning]
        is_set = key.name in sources
        if config is not None:
            cells.insert(0, "" if "[]" in key.name else value_text(value_at(config, key.name)))
        name = f"* {key.name}" if is_set else f"  {key.name}"
        table.add_row(Text(name), *(Text(cell) for cell in cells), style="bold" if is_set else "")
    return table
