"""Final answers: what is found in a text, what number it is, and when it is right."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tutelage.errors import RewardError
from tutelage.rewards.answers import last_number, marked_answer, number_of
from tutelage.rewards.mathematics import math_answer, numeric_match, too_heavy

STRICT, HASH, BOXED = math_answer(), math_answer(form="hash"), math_answer(form="boxed")
LENIENT = math_answer("lenient")


@pytest.mark.parametrize(
    ("text", "form", "found"),
    [
        ("so\n#### 72", "either", "72"),
        ("#### 1\n#### 2\n", "hash", "2"),
        ("####", "hash", ""),
        ("### 5", "hash", None),
        (r"\boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", "boxed", r"\{1, \{2\}\}"),
        (r"\boxed{1} then \fbox{2}", "boxed", "2"),
        (r"\boxed{1", "boxed", None),
        (r"#### 3 and \boxed{4}", "either", "4"),
        (r"\boxed{4} #### 3", "hash", "3"),
        (r"\boxed{4}", "hash", None),
        ("#### 4", "boxed", None),
    ],
)
def test_the_marked_answer_is_the_last_one_of_its_form(text, form, found):
    assert marked_answer(text, form) == found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", 72),
        ("72.", 72),
        (" $1,234.50 ", Fraction(2469, 2)),
        ("1,234,567", 1234567),
        ("-3", -3),
        ("−3", -3),
        ("$-3", -3),
        ("-$3", -3),
        ("+3", 3),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("50%", 50),
        (r"50\%", 50),
        ("50 percent", 50),
        ("72 clips", 72),
        (r"72\text{ cm}", 72),
        (r"1{,}234", 1234),
        (r"90^\circ", 90),
        ("**72**", 72),
        ("$72$", 72),
        ("0072", 72),
    ],
)
def test_a_number_is_read_exactly(text, number):
    found = number_of(text)
    assert found is not None
    assert found.value == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "72x",
        "7 or 8",
        "7 8",
        "7, 8",
        "1,23",
        "12,34",
        "3/0",
        "2+2",
        "x = 3",
        "7 clips and 3 more",
        "1.2.3",
        "--3",
    ],
)
def test_what_is_not_one_number_is_none(text):
    assert number_of(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 72 clips, 3 of them red.", 3),
        ("10-3=7", 7),
        ("7-3", 3),
        ("the change is -3", -3),
        ("x=-5", -5),
        ("it costs $1,234.56!", Fraction(123456, 100)),
        ("3/4 of them", Fraction(3, 4)),
        (r"\frac{3}{4} of them", Fraction(3, 4)),
        ("a1b2", 2),
        ("1, 2,3", 3),
        ("about 50 %.", 50),
    ],
)
def test_the_last_number_of_a_text(text, number):
    found = last_number(text)
    assert found is not None
    assert found.value == number


@pytest.mark.parametrize("text", ["", "none", "- % $"])
def test_a_text_without_numbers_has_no_last_one(text):
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("#### 1,234", "1234"),
        ("#### 1234", "1,234"),
        ("#### 72 clips", 72),
        ("#### 72", "48/2 = <<48/2=24>>24\n#### 72"),
        ("#### 3/4", 0.75),
        ("#### 50%", "0.5"),
        ("#### 50%", "50"),
        ("#### 0.5", "50%"),
        ("#### x = 72", "72"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"\boxed{\{1,2\}}", r"\{2,1\}"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{[0,1)}", "[0,1)"),
    ],
)
def test_right_answers(response, truth):
    assert STRICT(response, truth) == 1
    assert LENIENT(response, truth) == 1


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("#### 5", "-5"),
        ("#### 72 or 73", "72"),
        ("#### 72 73", "73"),
        ("#### 72\n#### 71", "72"),
        ("#### 72x", "72"),
        ("#### 5", "50%"),
        ("####", "72"),
        ("#### seventy-two", "72"),
        ("#### 1,2", "12"),
        ("#### 0.333333", "1/3"),
        ("#### 9^9^9^9", "1"),
        ("#### " + "9" * 400, "1"),
        (r"\boxed{x^2+1}", "(x+1)^2"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{(0,1]}", "[0,1)"),
        (r"\boxed{\foo{}", "1"),
        (r"\boxed{}", "1"),
        ("", "1"),
    ],
)
def test_wrong_answers(response, truth):
    assert STRICT(response, truth) == 0
    assert LENIENT(response, truth) == 0


@pytest.mark.parametrize(
    ("response", "truth"),
    [("The answer is 72.", "72"), (r"thus $x^2+1$", "1+x^2"), (r"\frac{3}{4} of it", "0.75")],
)
def test_what_is_right_leniently_only(response, truth):
    assert STRICT(response, truth) == 0
    assert LENIENT(response, truth) == 1


def test_each_form_is_asked_for_by_its_name():
    assert (HASH("#### 3", "3"), BOXED("#### 3", "3")) == (1, 0)
    assert (HASH(r"\boxed{3}", "3"), BOXED(r"\boxed{3}", "3")) == (0, 1)
    assert math_answer("lenient", "hash")(r"#### 3, not \boxed{4}".replace(", not", "\n"), "3") == 1


@pytest.mark.parametrize("truth", [None, "", "####"])
def test_a_truth_that_cannot_be_read_is_an_error(truth):
    with pytest.raises(RewardError, match=r"ground truth|is no number and no expression"):
        STRICT("#### 1 + x", truth)


NUMBERS = st.fractions(-(10**6), 10**6, max_denominator=50)
FILLER = st.text(st.characters(exclude_characters="#\\$", exclude_categories=("Cs",)), max_size=40)


@settings(deadline=None, max_examples=50)
@given(number=NUMBERS, other=NUMBERS, before=FILLER)
def test_a_number_is_right_for_itself_alone(number, other, before):
    text = f"{before}\n#### {number}"
    assert HASH(text, str(number)) == 1
    assume(number != other)
    assert HASH(text, str(other)) == 0


@settings(deadline=None, max_examples=50)
@given(whole=st.integers(0, 10**9))
def test_commas_and_currency_change_nothing(whole):
    assert HASH(f"#### ${whole:,}", whole) == 1
    assert LENIENT(f"that is ${whole:,}.", whole) == 1


@settings(deadline=None, max_examples=50)
@given(before=FILLER, number=NUMBERS, after=st.sampled_from(["", "\nDone 3.", r" \boxed{2}", "\n#### 2"]))
def test_what_is_right_strictly_is_right_leniently(before, number, after):
    text = f"{before}\n#### {number}{after}"
    for form in ("hash", "boxed", "either"):
        for truth in (str(number), "2"):
            assert math_answer("strict", form)(text, truth) <= math_answer("lenient", form)(text, truth)


def test_numeric_match_has_a_tolerance():
    close = numeric_match(tolerance=0.01)
    # relative to max(1, |truth|): 0.01 of 200 is 2, of 0.5 it is 0.01.
    assert [close(f"#### {x}", 200) for x in (198, 202, 197.9, 202.1)] == [1, 1, 0, 0]
    assert [close(f"#### {x}", "0.5") for x in (0.49, 0.51, 0.489)] == [1, 1, 0]
    fixed = numeric_match(tolerance=0.01, relative=False)
    assert [fixed(f"{x}", 200) for x in (200.01, 199.98)] == [1, 0]
    assert numeric_match(extract="strict")("200", 200) == 0
    with pytest.raises(RewardError, match="the truth 'x' is no number"):
        close("1", "x")


@pytest.mark.parametrize("text", ["9^{9^{9}}", "2^12345", "99999!", "3!!", "2**3**4", "1" * 60])
def test_what_sympy_would_compute_for_ever_is_not_given_to_it(text):
    assert too_heavy(text)


@pytest.mark.parametrize("text", ["x^2+y^{10}", "5!", r"\frac{1}{2}", "(1+x)^3 - 2^8"])
def test_ordinary_expressions_are(text):
    assert not too_heavy(text)
