"""The YAML of recipes: expected values are those of the YAML 1.2 core schema, written here by hand."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tutelage.config import recipe_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 0.00001),
        ("-2E+3", -2000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("10_000", 10000),
        ("010", 10),
        ("0x1F", 31),
        ("true", True),
        ("yes", "yes"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-5'", "1e-5"),
        ("null", None),
        ("", None),
        ("[1e-3, a, {b: 2}]", [0.001, "a", {"b": 2}]),
    ],
)
def test_scalars_are_read_as_people_write_them(text: str, value: object) -> None:
    read = recipe_yaml.parse_value(text)
    assert read == value
    assert type(read) is type(value)


def test_every_key_has_its_line() -> None:
    text = "a: 1\n\nb:\n  c: 2\n  d: [x,\n    {e: 3}]\n"
    assert recipe_yaml.parse(text).lines == {
        ("a",): 1,
        ("b",): 3,
        ("b", "c"): 4,
        ("b", "d"): 5,
        ("b", "d", "0"): 5,
        ("b", "d", "1"): 6,
        ("b", "d", "1", "e"): 6,
    }


def test_duplicate_keys_are_found_at_every_depth_but_not_across_sections() -> None:
    text = "a: 1\nb: {c: 1, c: 2}\na: 3\nd: {c: 1}\n"
    assert sorted(recipe_yaml.parse(text).duplicates) == [("a", 1, 3), ("b.c", 2, 2)]


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system ['true']", "a: &x [*x]", "a: [1", "a: *nowhere"])
def test_unsafe_recursive_and_broken_documents_are_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError) as error:
        recipe_yaml.parse(text)
    problem, line = recipe_yaml.problem_of(error.value)
    assert problem
    assert line == 1


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["1e-5", "yes", "0x1F", "010", "12:30", "null", "~", "<<", "1_0", "- a", "a: b", "2024-01-01"]),
)


@given(st.dictionaries(st.text("abc", min_size=1), st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=4))
def test_dump_reads_back_equal(value: dict[str, object]) -> None:
    read = recipe_yaml.parse_value(recipe_yaml.dump(value))
    assert read == value
    assert repr(read) == repr(value)
