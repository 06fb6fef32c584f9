"""Each built-in rule on cases made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutelage.errors import RewardError
from tutelage.rewards.calls import ONE, manner_of
from tutelage.rewards.library import BUILTIN_RULES
from tutelage.rewards.loading import load_rule


def value(spec: str, response: str, truth=None, tokens: int = 0, settings_of=None) -> float:
    """What the rule of a recipe gives one response."""
    rule = load_rule(spec, settings=settings_of)
    asked = {"response": response, "truth": truth, "tokens": tokens}
    return rule(**{name: asked[name] for name in manner_of(rule, spec).names})


def values(spec: str, *responses: str, **more) -> list[float]:
    return [value(spec, response, **more) for response in responses]


def test_exact_match():
    assert [value("exact_match", text, truth) for text, truth in ((" 42\n", 42), ("43", "42"), ("", "x"))] == [1, 0, 0]
    assert value("exact_match", "Paris", "paris") == 0
    assert value("exact_match(ignore_case=True)", "Paris", "paris ") == 1
    spec = r"exact_match(extract='####\\s*(-?[0-9]+)')"
    assert values(spec, "so #### 1, no: #### 7", "7", truth="7") == [1, 0]
    with pytest.raises(RewardError, match="exact_match has no ground truth"):
        value("exact_match", "a")


def test_regex():
    assert values("regex(pattern='a+b')", "xaab", "ba", "xAAB") == [1, 0, 0]
    assert values("regex(pattern='a+b', ignore_case=True)", "xAAB") == [1]


def test_contains():
    assert values("contains(texts=['cat', 'dog'])", "a Cat", "a bird", "hotdog") == [1, 0, 1]
    assert values("contains(texts=['cat', 'dog'], need='all')", "dogs and cats", "cats") == [1, 0]
    assert values("contains(texts=['cat'], ignore_case=False)", "Cat", "cat") == [0, 1]


def test_format_is_the_whole_response_in_the_order_of_its_tags():
    good = "<think>\n2+2\n</think>\n <answer> 4 </answer>\n"
    bad = (
        "<answer>4</answer><think>2+2</think>",
        "Well: " + good,
        good + "more",
        "<think>a</think>",
        "<think></think><answer>4</answer>",
        "<think> </think><answer>4</answer>",
        "<think>a<think>b</think><answer>4</answer>",
        "<think>a</think><answer>4</answer><answer>5</answer>",
        "<think>a</think>so<answer>4</answer>",
        "",
    )
    assert value("format", good) == 1
    assert values("format", *bad) == [0] * len(bad)
    assert values("format(template='<a>{}</a>')", "<a>x</a>", "<b>x</b>", "<a>\n<b>x</b></a>") == [1, 0, 1]


def test_length_range():
    assert values("length_range(low=2, high=3)", "a", "a b", "a b c", "a b c d") == [0, 1, 1, 0]
    assert values("length_range(high=2, unit='characters')", "", "ab", "abc") == [1, 1, 0]
    assert values("length_range(low=1)", "", "a") == [0, 1]
    assert [value("length_range(low=3, unit='tokens')", "a", tokens=t) for t in (2, 3)] == [0, 1]


def test_soft_overlong_is_the_line_of_dapo():
    # 100 tokens, of which the last 20 are the buffer: 80 is free, 85 a quarter down it, 100 and beyond -1.
    spec = "soft_overlong(limit=100, buffer=20)"
    assert [value(spec, "", tokens=t) for t in (0, 80, 85, 100, 101, 500)] == [0, 0, -0.25, -1, -1, -1]
    assert values("soft_overlong(limit=4, buffer=2, unit='characters')", "ab", "abc", "abcd") == [0, -0.5, -1]
    assert value("soft_overlong(limit=4, buffer=2, unit='words')", "a b c") == -0.5


def test_repetition():
    # "a b a b a": trigrams aba, bab, aba.  One of three repeats; the repeated one covers words 3 to 5 of 5.
    assert values("repetition_share", "a b A b a", "a b c d", "a b") == pytest.approx([1 / 3, 0, 0])
    assert values("repeated_words", "a b A b a", "a b c d", "a b", "") == pytest.approx([3 / 5, 0, 0, 0])
    assert value("repetition_share(ngram=1)", "no no no no") == 0.75
    assert value("repeated_words(ngram=1)", "no no no no") == 0.75


def test_ends_with_punctuation():
    texts = ("Yes.", 'He said "no!"  ', "Well", "", "a, b,", "(Done.)")
    assert values("ends_with_punctuation", *texts) == [1, 1, 0, 0, 0, 1]
    assert value("ends_with_punctuation(marks=',')", "a, b,") == 1


def test_script_share():
    assert values("script_share", "abc д", "漢字", "12 !", "café") == [0.75, 0, 1, 1]
    assert values("script_share(script='cjk')", "漢字ab") == [0.5]


def test_json_schema():
    wanted = {"schema": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}}
    responses = ('{"n": 1}', ' {"n": 1, "m": 2}\n', '{"n": "1"}', "{}", '{"n": 1} ok', "", "[" * 100_000)
    assert values("json_schema", *responses, settings_of=wanted) == [1, 1, 0, 0, 0, 0, 0]
    fenced = {**wanted, "fenced": True}
    texts = ('Here:\n```json\n{"n": 2}\n```\nBye', '```\n{"n": 1}\n```\n```\n{"m": 1}\n```\n', '{"n": 1}')
    assert values("json_schema", *texts, settings_of=fenced) == [1, 0, 0]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("regex(pattern='(')", "not a regular expression"),
        ("contains(texts='cat')", "texts is 'cat'"),
        ("contains(texts=['a'], need='some')", "need is 'some'"),
        ("format(template='think {} answer')", "template is"),
        ("length_range(low=5, high=2)", "low is 5 and high is 2"),
        ("length_range(unit='pages')", "unit is 'pages'"),
        ("soft_overlong(limit=10, buffer=20)", "limit is 10 and buffer is 20"),
        ("repetition_share(ngram=0)", "ngram is 0"),
        ("repeated_words(ngram=0)", "ngram is 0"),
        ("script_share(script='klingon')", "no letter is named 'klingon'"),
        ("json_schema(schema={'type': 'thing'})", "json_schema: "),
        ("json_schema(schema=3)", "schema is 3"),
        ("math_answer(extract='loose')", "extract is 'loose'"),
        ("math_answer(form='bold')", "form is 'bold'"),
        ("numeric_match(tolerance=-1)", "tolerance is -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(spec, said):
    with pytest.raises(RewardError, match=said) as caught:
        load_rule(spec)
    assert caught.value.fix


SETTINGS = {
    "regex": {"pattern": "a"},
    "contains": {"texts": ["a"]},
    "soft_overlong": {"limit": 10, "buffer": 5},
    "json_schema": {"schema": {}},
}


@settings(deadline=None, max_examples=50)
@given(response=st.text(), tokens=st.integers(0, 100))
def test_every_rule_gives_every_response_a_number_from_minus_one_to_one(response, tokens):
    for name in BUILTIN_RULES:
        if name != "math_answer":  # which may take its time: test_math_answers.py
            assert -1 <= value(name, response, "1", tokens, SETTINGS.get(name)) <= 1


def test_rules_ask_only_for_what_they_may():
    for name in BUILTIN_RULES:
        assert set(manner_of(load_rule(name, settings=SETTINGS.get(name)), name).names) <= set(ONE)


# Pairs of names that are near each other, and a response on which they differ.
@pytest.mark.parametrize(
    ("first", "second", "response", "truth"),
    [
        ("repetition_share", "repeated_words", "a b a b a", None),
        ("exact_match", "math_answer", "#### 1/2", "0.5"),
        ("math_answer", "numeric_match", "0.5", "1/2"),
        ("math_answer(extract='lenient')", "numeric_match", "0.3333333", "1/3"),
        ("math_answer", "math_answer(extract='lenient')", "it is 3", "3"),
        ("math_answer(form='hash')", "math_answer(form='boxed')", "#### 3", "3"),
        ("length_range(high=3, unit='characters')", "soft_overlong(limit=5, buffer=2, unit='characters')", "abc", None),
        ("regex(pattern='a.c')", "contains(texts=['a.c'])", "abc", None),
        ("format(template='<a>{}</a>')", "regex(pattern='<a>.+</a>')", "x<a>b</a>", None),
    ],
)
def test_no_two_names_are_the_same_rule(first, second, response, truth):
    assert abs(value(first, response, truth) - value(second, response, truth)) > 1e-3
