"""The docs name a test for every detail that scripts/mutations.toml removes; every removal fits the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = tomllib.loads((ROOT / "scripts" / "mutations.toml").read_text(encoding="utf-8"))["mutation"]
ROW = re.compile(r"^\| ([^|]+) \| `([^`|]+\.py)::(\w+)` \|$", re.MULTILINE)


def documented() -> list[tuple[str, str, str]]:
    """(detail, test file, test function) of every row, page by page."""
    pages = [
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for name in ("ppo", "grpo", "dpo", "activations", "kernels")
    ]
    return [row for page in pages for row in ROW.findall(page)]


def functions(path: str) -> set[str]:
    return set(re.findall(r"^def (\w+)\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))


def test_the_table_of_details_is_the_list_of_mutations():
    assert [detail for detail, _, _ in documented()] == [m["detail"] for m in MUTATIONS]


def test_every_detail_names_a_test_that_exists_and_that_its_mutation_runs():
    for (detail, file, function), mutation in zip(documented(), MUTATIONS, strict=True):
        assert function in functions(f"tests/{file}"), detail
        named = f"tests/{file}::{function}"
        assert any(named.startswith(test.partition("[")[0]) for test in mutation["tests"]), detail


def test_every_mutation_names_tests_that_exist():
    for mutation in MUTATIONS:
        for file, _, function in (test.partition("::") for test in mutation["tests"]):
            assert not function or function.partition("[")[0] in functions(file), mutation["detail"]


def test_what_a_mutation_replaces_is_in_the_code_exactly_once():
    source = ROOT / "src" / "tutelage"
    found = {m["detail"]: (source / m["file"]).read_text(encoding="utf-8").count(m["old"]) for m in MUTATIONS}
    assert {detail: count for detail, count in found.items() if count != 1} == {}
