"""Break each detail that makes PPO work, one at a time, and show which test turns red.

    python scripts/mutation_test.py [--only TEXT] [--jobs N] [--markdown]

Every mutation is one exact replacement in a copy of the package; the tests named beside it run against the copy. A
mutation that no test notices survives. One that ends in another error than a failed assertion is a crash: it shows that
something broke, not that a test holds the detail. Either makes the exit status 1. The list is `scripts/mutations.toml`.

torch and transformers are imported once, and every mutation is tried in a fork of this process: POSIX systems only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAILED = re.compile(r"^FAILED (.+?)(?: - (.*))?$", re.MULTILINE)
ASSERTED = ("assert", "AssertionError", "Failed: DID NOT", "Failed: Regex pattern")
SECONDS = 600
"""Of one mutation; more counts as a run that did not end."""
PRELOADED = (
    "torch",
    "scipy.stats",
    "datasets",
    "matplotlib.pyplot",
    "peft",
    "pydantic",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "distilbert", "gpt2", "llama")),
)


@dataclass(frozen=True)
class Mutation:
    """detail: what is removed; file, old, new: the replacement, `old` occurring once; tests: pytest arguments."""

    detail: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """test, reason: the first test that turned red and the first line of what it says; empty where none did."""

    mutation: Mutation
    test: str
    reason: str

    @property
    def verdict(self) -> str:
        if not self.test:
            return "SURVIVES"
        return "red" if self.reason.startswith(ASSERTED) else "CRASH"


def load_mutations() -> list[Mutation]:
    with open(ROOT / "scripts" / "mutations.toml", "rb") as file:
        entries = tomllib.load(file)["mutation"]
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def mutated_source(mutation: Mutation, package: Path) -> str:
    text = (package / "tutelage" / mutation.file).read_text(encoding="utf8")
    found = text.count(mutation.old)
    if found != 1:
        raise SystemExit(f"{mutation.detail}: the text to replace occurs {found} times in {mutation.file}, not once")
    return text.replace(mutation.old, mutation.new)


def start(source: Path, tests: tuple[str, ...], output: Path) -> int:
    """A fork that runs pytest on `tests` with the package at `source` and ends with its status; the process id."""
    child = os.fork()
    if child:
        return child
    try:
        with open(output, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(ROOT)
        sys.path.insert(0, str(source))
        sys.dont_write_bytecode = True
        signal.alarm(SECONDS)
        status = int(pytest.main(["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-rf", *tests]))
        sys.stdout.flush()
        os._exit(status)
    finally:
        os._exit(70)


def copy_package(package: Path, folder: Path) -> Path:
    return Path(shutil.copytree(package, folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")))


def mutant(package: Path, folder: Path, mutation: Mutation) -> Path:
    """A copy of `package` in `folder`, broken."""
    source = copy_package(package, folder)
    (source / "tutelage" / mutation.file).write_text(mutated_source(mutation, package), encoding="utf8")
    return source


def outcome_of(mutation: Mutation, status: int, output: str) -> Outcome:
    if status not in (0, 1):
        raise SystemExit(f"{mutation.detail}: pytest did not run its tests (status {status}):\n{output[-2000:]}")
    found = FAILED.search(output)
    if found is None and status == 1:
        return Outcome(mutation, mutation.tests[0], "an error outside of a test")
    return Outcome(mutation, found[1] if found else "", (found[2] or "") if found else "")


def outcomes(mutations: list[Mutation], package: Path, jobs: int) -> Iterator[Outcome]:
    """In the order in which they end; at most `jobs` at a time."""
    waiting, running = list(mutations), dict[int, tuple[Mutation, Path]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            mutation, folder = waiting.pop(0), Path(tempfile.mkdtemp())
            source = mutant(package, folder, mutation)
            running[start(source, mutation.tests, folder / "output")] = (mutation, folder)
        child, status = os.wait()
        mutation, folder = running.pop(child)
        output = (folder / "output").read_text(encoding="utf8", errors="replace")
        shutil.rmtree(folder)
        yield outcome_of(mutation, os.waitstatus_to_exitcode(status), output)


def require_green(mutations: list[Mutation], package: Path) -> None:
    """The same tests pass on the unchanged package, or a red one would mean nothing."""
    tests = tuple(sorted({test for mutation in mutations for test in mutation.tests}))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        _, status = os.waitpid(start(package, tests, output), 0)
        if os.waitstatus_to_exitcode(status) != 0:
            shown = output.read_text(encoding="utf8", errors="replace")[-3000:]
            raise SystemExit(f"the tests are not green before any mutation:\n{shown}")


def markdown(found: list[Outcome]) -> str:
    lines = ["| detail that is removed | broken in | test that turns red | what it says |", "|---|---|---|---|"]
    for outcome in found:
        test = f"`{outcome.test.removeprefix('tests/')}`" if outcome.test else "**none: the mutation survives**"
        reason = outcome.reason if len(outcome.reason) <= 90 else outcome.reason[:87] + "..."
        reason = f"`{reason}`".replace("|", "\\|") if reason else ""
        crash = "**crash** " if outcome.verdict == "CRASH" else ""
        lines.append(f"| {outcome.mutation.detail} | `{outcome.mutation.file}` | {test} | {crash}{reason} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="run the mutations whose detail contains this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/results")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "250", "TOKENIZERS_PARALLELISM": "false"}
    mutations = [m for m in load_mutations() if arguments.only is None or arguments.only in m.detail]
    for name in PRELOADED:
        import_module(name)
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        package = copy_package(ROOT / "src", Path(folder))
        for mutation in mutations:
            mutated_source(mutation, package)
        require_green(mutations, package)
        for outcome in outcomes(mutations, package, arguments.jobs):
            found.append(outcome)
            print(f"{outcome.verdict:8}  {outcome.mutation.detail}  {outcome.test}  {outcome.reason}", file=sys.stderr)
    found.sort(key=lambda outcome: mutations.index(outcome.mutation))
    if arguments.markdown:
        print(markdown(found) + "\n")
    red = sum(outcome.verdict == "red" for outcome in found)
    print(f"{red} of {len(found)} mutations turn a test red, in {time.perf_counter() - begun:.0f} s")
    sys.exit(0 if red == len(found) else 1)


if __name__ == "__main__":
    main()
