"""The built-in rules by the names that a recipe gives them.  Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from tutelage.rewards import builtin, mathematics

BUILTIN_RULES: dict[str, Callable[..., Callable[..., float]]] = {
    "exact_match": builtin.exact_match,
    "math_answer": mathematics.math_answer,
    "numeric_match": mathematics.numeric_match,
    "regex": builtin.regex,
    "contains": builtin.contains,
    "format": builtin.template_format,
    "json_schema": builtin.json_schema,
    "length_range": builtin.length_range,
    "soft_overlong": builtin.soft_overlong,
    "repetition_share": builtin.repetition_share,
    "repeated_words": builtin.repeated_words,
    "ends_with_punctuation": builtin.ends_with_punctuation,
    "script_share": builtin.script_share,
}
NEED_TRUTHS = frozenset({"exact_match", "math_answer", "numeric_match"})
"""Rules that cannot judge a response to a row without a ground truth."""
