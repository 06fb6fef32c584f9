"""Under --json stdout holds JSON alone, whatever else is printed and by whatever."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tutelage.cli.console import json_alone

PRINTS = """\
import os, subprocess, sys, threading
from tutelage.cli.console import echo_json, json_alone

def talk(word):
    print(word, "printed")
    sys.__stdout__.write(word + " written to the first stream\\n")
    os.write(1, (word + " written to the file\\n").encode())
    subprocess.run(["echo", word, "of a child"], check=True)

print("before")
with json_alone({asked}) as stream:
    talk("main")
    thread = threading.Thread(target=talk, args=("thread",))
    thread.start()
    thread.join()
    echo_json({{"right": True}}, stream)
    talk("late")
print("after")
"""
KINDS = ("printed", "written to the first stream", "written to the file", "of a child")


def outputs(asked: bool) -> tuple[list[str], list[str]]:
    code = PRINTS.format(asked=asked)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return found.stdout.splitlines(), found.stderr.splitlines()


def test_all_that_is_printed_beside_goes_to_stderr() -> None:
    stdout, stderr = outputs(asked=True)
    assert stdout == ["before", '{"right": true}', "after"]
    assert sorted(stderr) == sorted(f"{word} {kind}" for word in ("main", "thread", "late") for kind in KINDS)


def test_nothing_is_moved_where_no_json_was_asked_for() -> None:
    stdout, stderr = outputs(asked=False)
    assert stderr == []
    assert set(stdout) > {f"{word} {kind}" for word in ("main", "thread", "late") for kind in KINDS}


def test_an_error_puts_stdout_back(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        with json_alone(True):
            print("inside")
            raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"):
        fails()
    print("outside")
    seen = capfd.readouterr()
    assert (seen.out, seen.err) == ("outside\n", "inside\n")


@pytest.mark.parametrize("args", [("run", "mine.yaml"), ("resume", "runs/mine"), ("check", "mine.yaml")])
def test_a_command_with_json_prints_json_alone(
    args: tuple[str, ...], tutelage: Callable[..., Any], build: Any, folder: Path, new_run: Callable[..., Path]
) -> None:
    new_run(folder / "runs" / "mine")
    build.then = lambda run: print("a function of the user's own")
    check = build.check_recipe
    build.check_recipe = lambda loaded: (build.then(folder), check(loaded))[1]
    result = tutelage(*args, "--json")
    assert result.exit_code == 0
    assert [type(json.loads(line)) for line in result.stdout.splitlines()] == [dict]
    assert "a function of the user's own" in result.stderr
    assert "a function of the user's own" in tutelage(*args).stdout
