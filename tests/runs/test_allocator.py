"""Memory that was freed is used again, counted in page faults of a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tutelage.build.allocator import CHOSEN_BY_USER, keep_freed_memory
from tutelage.build.kit import Facts, Kit
from tutelage.layout import Place

PAGES_OF_A_BLOCK, ROUNDS = (96 << 20) // 4096, 10
SCRIPT = """
import resource, sys, torch
from tutelage.build.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(96 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(sum(touched() for _ in range(ROUNDS)))
""".replace("ROUNDS", str(ROUNDS))

needs_glibc = pytest.mark.skipif(
    not sys.platform.startswith("linux") or "gnu" not in sys.implementation._multiarch, reason="needs glibc"
)


def faults(how: str) -> int:
    clean = {name: value for name, value in os.environ.items() if name not in (*CHOSEN_BY_USER, "LD_PRELOAD")}
    clean.pop("GLIBC_TUNABLES", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, env=clean)
    return int(done.stdout)


@needs_glibc
def test_a_block_that_was_freed_is_not_cleared_by_the_kernel_again() -> None:
    """A small block may take a part of the place once, so that another is found."""
    assert faults("kept") < 4 * PAGES_OF_A_BLOCK
    assert faults("as it is") > (ROUNDS - 1) * PAGES_OF_A_BLOCK


@pytest.mark.parametrize("name", [*CHOSEN_BY_USER, "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_the_user_has_chosen_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutelage.build.allocator.ctypes.CDLL", lambda _: pytest.fail("the allocator was changed"))
    assert not keep_freed_memory({name: "1"})


def test_not_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutelage.build.allocator.ctypes.CDLL", lambda _: object())
    assert not keep_freed_memory({})
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory({})


def test_roles_on_a_cpu_keep_it_and_on_a_gpu_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("tutelage.build.kit.keep_freed_memory", lambda: asked.append("kept"))
    facts = Facts(cfg=None, updates=1)  # type: ignore[arg-type]
    Kit(facts, ("actor",), Place(device="cuda"))
    assert asked == []
    Kit(facts, ("actor",), Place(device="cpu"))
    assert asked == ["kept"]
