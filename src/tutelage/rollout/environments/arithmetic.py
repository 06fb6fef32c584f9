"""A calculator that evaluates nothing but arithmetic: numbers, + - * / // %, signs and brackets, in exact fractions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MOST_CHARACTERS = 200
LARGEST = Fraction(10) ** 30

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> Fraction:
    """The value.  Raises ValueError, in words for the one who wrote it, for anything that is not arithmetic."""
    text = expression.strip()
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"longer than {MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(text, mode="eval")
        return _value(tree.body)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not arithmetic") from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(_number(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(Fraction(_BINARY[type(node.op)](_value(node.left), _value(node.right))))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    raise ValueError("not arithmetic")


def _number(value: object) -> Fraction:
    """A decimal is what its digits say: 0.1 is 1/10."""
    try:
        return Fraction(repr(value))
    except ValueError as error:  # inf, of 1e999
        raise ValueError("too large") from error


def _bounded(value: Fraction) -> Fraction:
    if abs(value) > LARGEST or value.denominator > LARGEST:
        raise ValueError("too large")
    return value


def shown(value: Fraction) -> str:
    """A whole number as such, else up to ten significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def number_in(text: object) -> Fraction | None:
    """The number that a text is, commas between thousands allowed; None where it is none."""
    try:
        return Fraction(str(text).strip().replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
