r"""Rules on the text of a response: each function takes the settings and returns the rule.  Torch-free.

A recipe names one as `exact_match`, or with settings as `length_range(low=20, high=80)`; docs/rewards.md lists all.
Every rule is called for each response with what it names (`rewards.calls`), and returns a float.
"""

from __future__ import annotations

import importlib
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tutelage.errors import MissingExtraError, RewardError, installed

Rule = Callable[..., float]
Unit = Literal["words", "characters", "tokens"]
UNITS = ("words", "characters", "tokens")
TEMPLATE = "<think>{}</think><answer>{}</answer>"
_TAG = re.compile(r"<[^<>\s]+>")


def compiled(pattern: str, name: str, flags: int = 0) -> re.Pattern[str]:
    """Raises RewardError for what is not a regular expression."""
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise RewardError(
            f"{name} {pattern!r} is not a regular expression: {error}", fix="correct the pattern"
        ) from error


def require_extra(package: str, rule: str) -> None:
    """Raises MissingExtraError where the package of a rule is not installed."""
    if not installed(package):
        raise MissingExtraError(
            f"the rule {rule} needs {package}, which is not installed", fix="pip install 'tutelage[rules]'"
        )


def length_of(response: str, tokens: int, unit: Unit) -> int:
    if unit == "tokens":
        return tokens
    return len(response.split()) if unit == "words" else len(response)


def require_unit(unit: str, rule: str) -> None:
    if unit not in UNITS:
        raise RewardError(f"{rule}: unit is {unit!r}", fix=f"use {', '.join(UNITS)}")


def exact_match(ignore_case: bool = False, extract: str | None = None) -> Rule:
    r"""1 when the response equals the ground truth, else 0; white space at both ends does not count.

    extract: a regular expression; its last match in the response (group 1 where it has one) is compared instead of the
    whole, and no match scores 0: `exact_match(extract='####\\s*(-?\\d+)')`.
    A response without a ground truth raises RewardError.
    """
    pattern = None if extract is None else compiled(extract, "exact_match: extract")

    def answer(response: str) -> str | None:
        if pattern is None:
            return response
        found = list(pattern.finditer(response))
        return found[-1].group(1 if pattern.groups else 0) if found else None

    def normal(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    def rule(response: str, truth: Any) -> float:
        got = answer(response)
        expected = require_truth(truth, "exact_match")
        return float(got is not None and normal(got) == normal(str(expected)))

    return rule


def require_truth(truth: Any, rule: str) -> Any:
    if truth is None:
        fix = "give the data a truth column, or drop this rule"
        raise RewardError(f"{rule} has no ground truth", fix=fix)
    return truth


def regex(pattern: str, ignore_case: bool = False) -> Rule:
    """1 when the regular expression is found anywhere in the response, else 0."""
    found = compiled(pattern, "regex: pattern", re.IGNORECASE if ignore_case else 0)
    return lambda response: float(found.search(response) is not None)


def contains(texts: Sequence[str], need: Literal["any", "all"] = "any", ignore_case: bool = True) -> Rule:
    """1 when the response holds any (or all) of the texts, else 0."""
    if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise RewardError(f"contains: texts is {texts!r}", fix="give a list of at least one text")
    if need not in ("any", "all"):
        raise RewardError(f"contains: need is {need!r}", fix="use any or all")
    wanted = [text.casefold() if ignore_case else text for text in texts]
    enough = any if need == "any" else all

    def rule(response: str) -> float:
        seen = response.casefold() if ignore_case else response
        return float(enough(text in seen for text in wanted))

    return rule


def template_format(template: str = TEMPLATE) -> Rule:
    """1 when the whole response is the template, else 0; each {} stands for some text without any tag of the template.

    Tags are `<...>`.  White space around a tag does not count.  Each {} must hold more than white space.
    (DeepSeek-R1's format reward, arXiv:2501.12948, section 2.2.2.)
    """
    tags = list(dict.fromkeys(_TAG.findall(template)))
    if "{}" not in template or not tags:
        raise RewardError(
            f"format: template is {template!r}", fix=f"give tags with {{}} between them, such as {TEMPLATE}"
        )
    inside = "((?:(?!" + "|".join(re.escape(tag) for tag in tags) + ").)*)"
    parts = [part for part in re.split(r"(\{\}|<[^<>\s]+>)", template) if part.strip()]
    whole, before = "", ""
    for part in parts:
        between = r"\s*" if before and "{}" not in (before, part) else ""
        whole += between + (inside if part == "{}" else re.escape(part.strip()))
        before = part
    pattern = re.compile(rf"\s*{whole}\s*", re.DOTALL)

    def rule(response: str) -> float:
        found = pattern.fullmatch(response)
        return float(found is not None and all(text.strip() for text in found.groups()))

    return rule


def length_range(low: int = 0, high: int | None = None, unit: Unit = "words") -> Rule:
    """1 when the response has `low` to `high` words (split at white space), characters or tokens, else 0."""
    require_unit(unit, "length_range")
    if low < 0 or (high is not None and high < low):
        raise RewardError(f"length_range: low is {low} and high is {high}", fix="use 0 <= low <= high")

    def rule(response: str, tokens: int) -> float:
        length = length_of(response, tokens, unit)
        return float(low <= length and (high is None or length <= high))

    return rule


def soft_overlong(limit: int, buffer: int, unit: Unit = "tokens") -> Rule:
    """0 up to limit - buffer, then falling in a straight line to -1 at the limit, and -1 beyond.

    R = 0                                     L <= limit - buffer
        ((limit - buffer) - L) / buffer       limit - buffer < L <= limit
        -1                                    limit < L            (DAPO, arXiv:2503.14476, eq. 13)
    """
    require_unit(unit, "soft_overlong")
    if not 0 < buffer <= limit:
        raise RewardError(f"soft_overlong: limit is {limit} and buffer is {buffer}", fix="use 0 < buffer <= limit")

    def rule(response: str, tokens: int) -> float:
        over = length_of(response, tokens, unit) - (limit - buffer)
        return -min(max(over / buffer, 0.0), 1.0)

    return rule


def repetition_share(ngram: int = 3) -> Rule:
    """1 - (different word n-grams / all word n-grams) of the response, from 0 (nothing repeated) towards 1.

    0 for a response shorter than n words. Words are lower-cased and split at white space. Give it a negative weight.
    """
    require_ngram(ngram, "repetition_share")

    def rule(response: str) -> float:
        grams = _grams(response, ngram)
        return 1 - len(set(grams)) / len(grams) if grams else 0.0

    return rule


def repeated_words(ngram: int = 3) -> Rule:
    """Share of the words that lie in an n-gram which the response has had before, from 0 to 1.

    The repetition penalty of Yeo et al. 2025 (Demystifying long chain-of-thought reasoning, arXiv:2502.03373), which
    falls on every token of a repeated n-gram, as a share of the response.  Give it a negative weight.
    """
    require_ngram(ngram, "repeated_words")

    def rule(response: str) -> float:
        count = len(response.split())
        seen: set[tuple[str, ...]] = set()
        repeated: set[int] = set()
        for start, gram in enumerate(_grams(response, ngram)):
            if gram in seen:
                repeated.update(range(start, start + ngram))
            seen.add(gram)
        return len(repeated) / count if count else 0.0

    return rule


def require_ngram(ngram: int, rule: str) -> None:
    if ngram < 1:
        raise RewardError(f"{rule}: ngram is {ngram}", fix="use at least 1")


def _grams(response: str, ngram: int) -> list[tuple[str, ...]]:
    words = response.lower().split()
    return [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]


def ends_with_punctuation(marks: str = ".!?") -> Rule:
    """1 when the last character of the response, closing quotes, brackets and white space aside, is one of `marks`."""

    def rule(response: str) -> float:
        end = response.rstrip().rstrip("\"'”’)]}»").rstrip()
        return float(bool(end) and end[-1] in marks)

    return rule


def script_share(script: str = "latin") -> Rule:
    """Share of the letters that belong to a script by their Unicode name (latin, greek, cyrillic, cjk, hiragana...).

    1 for a response without letters.  The language consistency of DeepSeek-R1 is of this kind, counted in words.
    """
    wanted = script.upper()
    if not any(unicodedata.name(chr(code), "").startswith(wanted + " ") for code in range(0xB000)):
        raise RewardError(f"script_share: no letter is named {script!r}", fix="use latin, greek, cyrillic, cjk, ...")

    def rule(response: str) -> float:
        letters = [character for character in response if character.isalpha()]
        ours = sum(unicodedata.name(letter, "").startswith(wanted + " ") for letter in letters)
        return ours / len(letters) if letters else 1.0

    return rule


def json_schema(schema: dict[str, Any], fenced: bool = False) -> Rule:
    """1 when the response is JSON that the schema (draft 2020-12) allows, else 0.

    fenced: the last block between ``` lines is read instead of the whole.  References to other places are not followed.
    Needs the package jsonschema.
    """
    require_extra("jsonschema", "json_schema")
    jsonschema = importlib.import_module("jsonschema")
    registry = importlib.import_module("referencing").Registry()
    if not isinstance(schema, dict):
        raise RewardError(f"json_schema: schema is {schema!r}", fix="give a mapping, such as {'type': 'object'}")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise RewardError(f"json_schema: {error.message}", fix="correct the schema") from error
    validator = jsonschema.Draft202012Validator(schema, registry=registry)
    fence = re.compile(r"^```[^\n`]*\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)

    def rule(response: str) -> float:
        blocks = fence.findall(response) if fenced else [response]
        try:
            value = json.loads(blocks[-1]) if blocks else None
        except (ValueError, RecursionError):
            return 0.0
        return float(bool(blocks) and validator.is_valid(value))

    return rule
