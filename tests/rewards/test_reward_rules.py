"""Rule sources: how they are named and loaded, what they are given, and what each wrong answer says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rewards_kit import text_rollout

from tutelage.errors import RewardError
from tutelage.protocols import RewardSource
from tutelage.rewards.builtin import BUILTIN_RULES
from tutelage.rewards.rules import RuleSource, load_rule

RULES = """
def lengths(prompts, responses, truths):
    return [len(p) + 10 * len(r) + 100 * t for p, r, t in zip(prompts, responses, truths)]

def at_least(words):
    return lambda prompts, responses, truths: [float(len(r.split()) >= words) for r in responses]

def too_few(prompts, responses, truths):
    return [1.0] * (len(responses) - 1)

def words(prompts, responses, truths):
    return [1.0, "good", 2.0][: len(responses)]

def holes(prompts, responses, truths):
    return [float("nan") if not r else 1.0 for r in responses]

def infinite(prompts, responses, truths):
    return [1.0 / 1e-320 if r == "b" else 0 for r in responses]

def divides(prompts, responses, truths):
    return [1 / len(r) for r in responses]

def nothing(prompts, responses, truths):
    pass

def number(prompts, responses, truths):
    return 1.0

NOT_A_FUNCTION = 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rules.py").write_text(RULES)
    return tmp_path


def test_a_function_from_a_file_sees_prompt_texts_responses_and_truths(folder):
    source: RewardSource = RuleSource("rules.py:lengths", folder=folder)
    rollout = text_rollout(
        "ab",
        "c",
        truths=[1, 2],
        messages=[
            ({"role": "user", "content": "hey"},),
            ({"role": "system", "content": "x"}, {"role": "user", "content": "y"}),
        ],
    )
    # "hey" is 3 long; "system: x\nuser: y" is 9 + 1 + 7 = 17 long.
    score_B = source.score(rollout)
    assert score_B.tolist() == [3 + 20 + 100, 17 + 10 + 200]
    assert score_B.dtype == torch.float32
    assert source.name == "lengths"


def test_a_function_with_settings(folder):
    source = RuleSource("rules.py:at_least(words=2)", folder=folder)
    assert source.score(text_rollout("one", "one two")).tolist() == [0.0, 1.0]
    assert source.name == "at_least"


def test_a_function_from_a_module():
    assert RuleSource("tutelage.rewards.builtin:regex(pattern='a+b')").score(text_rollout("xaab", "ba")).tolist() == [
        1,
        0,
    ]


@pytest.mark.parametrize(
    "value", [[1, 2], [True, False], (0.5, 1.5), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), [np.float32(1), 2]]
)
def test_any_sequence_of_real_numbers_will_do(value):
    source = RuleSource("exact_match")
    source.rule = lambda prompts, responses, truths: value
    assert source.score(text_rollout("a", "b")).tolist() == [float(v) for v in value]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("too_few", r"rules\.py:too_few returned 2 scores for 3 responses"),
        ("words", r"rules\.py:words returned 'good', a str, for row 1 \(prompt 'id1', sample 0, response ''\)"),
        ("holes", r"rules\.py:holes returned nan for row 1 \(prompt 'id1'"),
        ("infinite", r"rules\.py:infinite returned inf for row 2 \(prompt 'id2', sample 0, response 'b'\)"),
        ("divides", r"rules\.py:divides failed on row 1 \(prompt 'id1'.*ZeroDivisionError: division by zero"),
        ("nothing", r"rules\.py:nothing returned a NoneType"),
        ("number", r"rules\.py:number returned a float: 1\.0"),
    ],
)
def test_each_wrong_answer_names_rule_row_value_and_fix(folder, rule, said):
    source = RuleSource(f"rules.py:{rule}", folder=folder)
    with pytest.raises(RewardError, match=said) as caught:
        source.score(text_rollout("a", "", "b"))
    assert caught.value.fix


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("exact_mach", r"Did you mean exact_match\?"),
        ("zzz", r"Built in are exact_match, regex"),
        ("missing.py:f", r"there is no file .*missing\.py"),
        ("no_such_module_here:f", r"importing no_such_module_here failed: ModuleNotFoundError"),
        ("rules.py:lenghts", r"no function named 'lenghts'\. Did you mean lengths\?"),
        ("rules.py:NOT_A_FUNCTION", r"holds a int, not a function"),
        ("rules.py:at_least(3)", r"only key=value settings"),
        ("rules.py:at_least(words=open('x'))", r"cannot be read"),
        ("rules.py:at_least(words=3", r"cannot be read"),
        ("rules.py:at_least(letters=3)", r"could not be made: TypeError"),
        ("regex(pattern='(')", r"not a regular expression"),
        ("length_range(low=5, high=2)", r"low is 5 and high is 2"),
        ("length_range(unit='pages')", r"unit is 'pages'"),
        ("repetition_share(ngram=0)", r"ngram is 0"),
    ],
)
def test_a_rule_that_cannot_be_loaded_says_why(folder, spec, said):
    with pytest.raises(RewardError, match=said) as caught:
        load_rule(spec, folder)
    assert caught.value.fix


def test_a_file_that_fails_on_import_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("import json\nraise KeyError('oops')\n")
    with pytest.raises(RewardError, match=r"broken\.py failed: KeyError: 'oops'"):
        load_rule("broken.py:f", tmp_path)


def builtin(spec, *texts, **kwargs):
    return RuleSource(spec).score(text_rollout(*texts, **kwargs)).tolist()


def test_exact_match():
    assert builtin("exact_match", " 42\n", "43", "", truths=[42, "42", "x"]) == [1, 0, 0]
    assert builtin("exact_match", "Paris", truths=["paris"]) == [0]
    assert builtin("exact_match(ignore_case=True)", "Paris", truths=["paris "]) == [1]
    spec = r"exact_match(extract='####\\s*(-?[0-9]+)')"
    assert builtin(spec, "so #### 1, no: #### 7", "7", truths=["7", "7"]) == [1, 0]


def test_exact_match_without_a_truth_names_the_row():
    with pytest.raises(RewardError, match=r"row 1 .*no ground truth"):
        builtin("exact_match", "a", "b", truths=["a", None])


def test_length_range():
    assert builtin("length_range(low=2, high=3)", "a", "a b", "a b c", "a b c d") == [0, 1, 1, 0]
    assert builtin("length_range(high=2, unit='characters')", "", "ab", "abc") == [1, 1, 0]
    assert builtin("length_range(low=1)", "", "a") == [0, 1]


def test_repetition_share():
    # "a b a b a": trigrams aba, bab, aba -> 2 different of 3.
    assert builtin("repetition_share", "a b A b a", "a b c d", "a b") == pytest.approx([1 / 3, 0, 0])
    assert builtin("repetition_share(ngram=1)", "no no no no") == [0.75]


def test_ends_with_punctuation():
    texts = ("Yes.", 'He said "no!"  ', "Well", "", "a, b,", "(Done.)")
    assert builtin("ends_with_punctuation", *texts) == [1, 1, 0, 0, 0, 1]
    assert builtin("ends_with_punctuation(marks=',')", "a, b,") == [1]


def test_every_builtin_rule_has_a_docstring():
    assert all(rule.__doc__ for rule in BUILTIN_RULES.values())
