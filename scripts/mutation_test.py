"""Break each detail that makes PPO work, one at a time, and show which test turns red.

    python scripts/mutation_test.py [--only NAME] [--jobs N] [--markdown]

Every mutation is one exact replacement in a copy of the package; the tests named beside it run against the copy. A
mutation that no test notices survives, and the exit status is 1. The list is `scripts/mutations.toml`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """detail: what is removed; file, old, new: the replacement, `old` occurring once; tests: pytest arguments."""

    detail: str
    file: str
    old: str
    new: str
    tests: list[str]


@dataclass(frozen=True)
class Outcome:
    mutation: Mutation
    killed_by: tuple[str, ...]
    output: str


def load_mutations() -> list[Mutation]:
    with open(ROOT / "scripts" / "mutations.toml", "rb") as file:
        return [Mutation(**entry) for entry in tomllib.load(file)["mutation"]]


def mutated_source(mutation: Mutation) -> str:
    text = (ROOT / "src" / "tutelage" / mutation.file).read_text(encoding="utf8")
    found = text.count(mutation.old)
    if found != 1:
        raise SystemExit(f"{mutation.detail}: the text to replace occurs {found} times in {mutation.file}, not once")
    return text.replace(mutation.old, mutation.new)


def run_tests(source: Path, tests: list[str]) -> tuple[int, str]:
    """Pytest on `tests` with the package at `source`; the exit status and the output."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-rf", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def try_mutation(mutation: Mutation) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        (source / "tutelage" / mutation.file).write_text(mutated_source(mutation), encoding="utf8")
        status, output = run_tests(source, mutation.tests)
    if status not in (0, 1):
        raise SystemExit(f"{mutation.detail}: pytest did not run its tests (status {status}):\n{output[-2000:]}")
    return Outcome(mutation, tuple(FAILED.findall(output)), output)


def require_green(mutations: list[Mutation]) -> None:
    """The same tests pass on the unchanged package, or a red one would mean nothing."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    status, output = run_tests(ROOT / "src", tests)
    if status != 0:
        raise SystemExit(f"the tests are not green before any mutation:\n{output[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="run the mutations whose detail contains this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/results")
    arguments = parser.parse_args()
    mutations = [m for m in load_mutations() if arguments.only is None or arguments.only in m.detail]
    require_green(mutations)
    survivors = 0
    if arguments.markdown:
        print("| detail | broken in | test that turns red |\n|---|---|---|")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(try_mutation, mutations):
            survivors += not outcome.killed_by
            red = ", ".join(outcome.killed_by) or "NONE: the mutation survives"
            row = (outcome.mutation.detail, outcome.mutation.file, red)
            print(f"| {row[0]} | `{row[1]}` | `{row[2]}` |" if arguments.markdown else "  ".join(row), flush=True)
    print(f"\n{len(mutations) - survivors} of {len(mutations)} mutations turn a test red")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
