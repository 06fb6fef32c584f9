r"""The final answer in a text, and the exact number that it is.  Torch-free.

A marked answer is what follows `####` on its line (the convention of GSM8K), or what `\boxed{...}` holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

Form = Literal["hash", "boxed", "either"]

_HASH = re.compile(r"####[ \t]*([^\n]*)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_MINUS = "−–"
_FRACTION = r"\\[dt]?frac\s*\{\s*(?P<top>[+-]?\d+)\s*\}\s*\{\s*(?P<bottom>\d+)\s*\}"
_NUMBER = rf"(?P<whole>\d+)\s+(?P<over>\d+)/(?P<under>\d+)|(?P<first>{_DIGITS})(?:\s*/\s*(?P<second>{_DIGITS}))?"
_ALONE = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:[$€£¥₹]\s*(?P<inner>[+-]?))?\s*(?:{_FRACTION}|{_NUMBER})"
    r"\s*(?P<percent>%|percent\b)?(?:\s+[^\W\d_][^\d=+*/^<>\\]*)?\s*[.!]?"
)
"""One number and nothing else but currency, percent, and a unit in words after white space."""
_IN_TEXT = re.compile(
    rf"(?<![\w.,/])(?P<sign>-?)(?:[$€£¥₹](?P<inner>-?))?(?:{_FRACTION}|(?P<first>{_DIGITS})(?:/(?P<second>{_DIGITS}))?)"
    r"(?P<percent>\s?%)?"
    rf"|(?<![\d.])(?P<first2>{_DIGITS})(?P<percent2>\s?%)?"
)
_LATEX = (
    (re.compile(r"\\[!,;: ]"), ""),
    (re.compile(r"\\left|\\right|\\displaystyle"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\^\s*\{?\\circ\}?|°"), ""),
    (re.compile(r"\*\*|\\\(|\\\)|\\\[|\\\]"), ""),
)


def marked_answer(text: str, form: Form = "either") -> str | None:
    """The last marked answer of the text; None where there is none, "" where the mark is followed by nothing."""
    found = list(_marked(text, form))
    return max(found)[1] if found else None


def _marked(text: str, form: Form) -> Iterator[tuple[int, str]]:
    """(position, answer) of every marked answer."""
    if form != "boxed":
        yield from ((match.start(), match.group(1).strip()) for match in _HASH.finditer(text))
    if form != "hash":
        for match in _BOXED.finditer(text):
            inside = balanced(text, match.end())
            if inside is not None:
                yield match.start(), inside.strip()


def balanced(text: str, start: int) -> str | None:
    """What stands between a `{` that ends before `start` and its `}`; None where it is not closed.  `\\{` is text."""
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
        i += 1
    return None


def plain(text: str) -> str:
    """The text without LaTeX that only sets type, and with one kind of minus."""
    for minus in _MINUS:
        text = text.replace(minus, "-")
    for pattern, instead in _LATEX:
        text = pattern.sub(instead, text)
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return text


class Number:
    """An exact number; `percent` where it was written with one."""

    def __init__(self, value: Fraction, percent: bool = False) -> None:
        self.value = value
        self.percent = percent

    def readings(self) -> set[Fraction]:
        """50% is read as 50 and as 1/2: questions ask for a percentage either way."""
        return {self.value, self.value / 100} if self.percent else {self.value}

    def same(self, other: Number) -> bool:
        return bool(self.readings() & other.readings())


def number_of(text: str) -> Number | None:
    """The number that the text is, and nothing else: `-3`, `$1,234.50`, `3/4`, `1 1/2`, `\\frac{3}{4}`, `50%`, `9 m`.

    None for anything else, also for several numbers, an expression, or a division by zero.
    """
    found = _ALONE.fullmatch(plain(text))
    return None if found is None else _value(found.groupdict())


def last_number(text: str) -> Number | None:
    """The last number in a text; a `-` is its sign where nothing stands before it that could be subtracted from."""
    last = None
    for found in _IN_TEXT.finditer(plain(text)):
        last = found
    return None if last is None else _value(last.groupdict())


def _value(parts: dict[str, str | None]) -> Number | None:
    signs = (parts.get("sign") or "") + (parts.get("inner") or "")
    if len(signs) > 1:
        return None
    sign = -1 if signs == "-" else 1
    percent = bool(parts.get("percent") or parts.get("percent2"))
    if parts.get("top") is not None:
        top, bottom = _exact(parts["top"]), _exact(parts["bottom"])
    elif parts.get("whole") is not None:
        bottom = _exact(parts["under"])
        top = _exact(parts["whole"]) * bottom + _exact(parts["over"])
    else:
        top, bottom = _exact(parts.get("first") or parts.get("first2")), _exact(parts.get("second") or "1")
    return None if bottom == 0 else Number(sign * top / bottom, percent)


def _exact(digits: str | None) -> Fraction:
    assert digits is not None
    return Fraction(digits.replace(",", ""))
