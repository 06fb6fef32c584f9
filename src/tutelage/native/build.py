"""Compiles `kernels.cpp` for this machine, once, and loads it.

The library lies in the user's cache, named by a hash of the source, the flags, the compiler and the processor, so a new
version or another machine has its own.  It needs a C++ compiler with OpenMP (g++ or clang++) on the machine; without
one torch's operators compute the same, slower.  Nothing else depends on it.

TUTELAGE_KERNELS in the environment: `off` leaves the library alone, `required` makes its absence an error, `auto` is
what happens without it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tutelage.errors import ConfigError

SOURCE = Path(__file__).with_name("kernels.cpp")
SWITCH = "TUTELAGE_KERNELS"
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 300
"""That a compiler may take; it takes two."""


@dataclass(frozen=True, eq=False)
class Found:
    """library: None where there is none, and `why` says why."""

    library: ctypes.CDLL | None
    why: str


@functools.cache
def kernels() -> Found:
    """The compiled kernels of this process, compiled first where the cache has none.

    Raises ConfigError for another value of TUTELAGE_KERNELS, and where they are required and cannot be had.
    """
    wanted = switch()
    if wanted == "off":
        return Found(None, f"{SWITCH} is off")
    try:
        return Found(_loaded(), "")
    except (OSError, subprocess.SubprocessError) as error:
        why = " ".join(str(error).split())[:500]
    if wanted == "required":
        raise ConfigError(f"the CPU kernels are required ({SWITCH}) and cannot be had: {why}", fix=_FIX)
    warnings.warn(
        f"no compiled CPU kernels, so torch's operators are used, which are slower: {why}. {_FIX}", stacklevel=2
    )
    return Found(None, why)


def switch() -> str:
    """What TUTELAGE_KERNELS says: auto, off or required.  Raises ConfigError for anything else."""
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "off", "required"):
        raise ConfigError(f"{SWITCH} is {wanted!r}", fix="set it to auto, off or required, or leave it out")
    return wanted


def described() -> str:
    """For the record of a run: "compiled", or why there are none; with a GPU they are not looked for."""
    return "a GPU computes" if torch.cuda.is_available() else kernels().why or "compiled"


_FIX = f"Install a C++ compiler with OpenMP (g++ or clang++), name one in CXX, or set {SWITCH}=off."


def _loaded() -> ctypes.CDLL:
    """Raises OSError or SubprocessError, which say what was missing or what the compiler printed."""
    compiler = compiler_command()
    source = SOURCE.read_bytes()
    parts = (" ".join([*compiler, *FLAGS]), _version(compiler), _processor())
    what = (source, *(part.encode() for part in parts))
    name = hashlib.sha256(b"\0".join(what)).hexdigest()[:24]
    path = cache_folder() / f"kernels-{name}.so"
    if not path.exists():
        _compile(compiler, path)
    return ctypes.CDLL(str(path))


def compiler_command() -> list[str]:
    """The compiler, with what CXX has before or behind it.  Raises OSError where there is none."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else COMPILERS:
        command = shlex.split(candidate)
        path = shutil.which(command[0]) if command else None
        if path is not None:
            return [path, *command[1:]]
    raise OSError(f"CXX is {named!r}, which is not found" if named else f"none of {', '.join(COMPILERS)} is found")


def _version(compiler: Sequence[str]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=SECONDS, check=True).stdout


def _processor() -> str:
    """What `-march=native` depends on: machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    shown = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(shown)))


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/tutelage` or `~/.cache/tutelage`; where that cannot be written, a temporary one of this user."""
    user = os.getuid()
    folders = [Path(tempfile.gettempdir()) / f"tutelage-{user}"]
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # a user without a home
        folders.insert(0, (Path(base) if base else Path.home() / ".cache") / "tutelage")
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == user:
            return folder
    raise OSError("no folder for the compiled kernels can be written: set XDG_CACHE_HOME to one that can")


def _compile(compiler: Sequence[str], path: Path) -> None:
    """Whole or not at all: other processes may compile the same at the same time."""
    print("compiling the CPU kernels for this machine, once (a few seconds)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-400:]}")
        os.replace(made, path)
