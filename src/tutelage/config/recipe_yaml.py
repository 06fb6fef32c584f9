"""The YAML of recipes: safe, with line numbers, without duplicate keys, with numbers as people write them.

Scalars follow the YAML 1.2 core schema: `1e-5` is a number, `yes` and `12:30` are strings, `010` is ten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

_FLOAT = re.compile(
    r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own protocol)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 16) if text.lower().startswith("0x") else int(text, 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class _Dumper(yaml.SafeDumper):
    """Quotes a string that this loader, or a YAML 1.1 loader, would read as something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Line breaks and control characters only survive in double quotes.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_str)


class Document:
    """A parsed recipe: `value`, the line of every key path, and what is wrong with its keys."""

    def __init__(self, value: Any, lines: dict[tuple[str, ...], int], duplicates: list[tuple[str, int, int]]) -> None:
        self.value = value
        self.lines = lines
        self.duplicates = duplicates


def parse(text: str) -> Document:
    """Value, lines (1-based, of each mapping key by its path) and duplicate keys (name, first line, second line).

    Raises yaml.YAMLError: `problem_of` says it in one line.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(None, {}, [])
        lines: dict[tuple[str, ...], int] = {}
        duplicates: list[tuple[str, int, int]] = []
        for path, line in _key_lines(node, (), ()):
            if path in lines:
                duplicates.append((".".join(path), lines[path], line))
            lines[path] = line
        return Document(loader.construct_document(node), lines, duplicates)
    finally:
        loader.dispose()


def _key_lines(node: yaml.Node, path: tuple[str, ...], above: tuple[int, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if id(node) in above:
        mark = node.start_mark
        raise yaml.constructor.ConstructorError(None, None, "a node that contains itself", mark)
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            yield (*path, key), key_node.start_mark.line + 1
            yield from _key_lines(value_node, (*path, key), above)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, str(index)), item.start_mark.line + 1
            yield from _key_lines(item, (*path, str(index)), above)


def parse_value(text: str) -> Any:
    """The value of an override: a YAML scalar, list or mapping. Raises yaml.YAMLError."""
    return parse(text).value


def dump(value: Any) -> str:
    """YAML that `parse` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def problem_of(error: yaml.YAMLError) -> tuple[str, int | None]:
    """What a YAML error says, and its line (1-based) where it has one."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return problem, None if mark is None else mark.line + 1
