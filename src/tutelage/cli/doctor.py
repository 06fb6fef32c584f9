"""doctor: is this machine and this installation fit to train, and if not, what to change."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from tutelage.cli.console import echo_json

DISK_NEEDED = 2_000_000_000
MARKS = {"ok": "ok      ", "absent": "absent  ", "problem": "PROBLEM "}


@dataclass(frozen=True)
class Finding:
    """One line of the examination. `absent` is an optional part that is not installed."""

    name: str
    state: Literal["ok", "absent", "problem"]
    detail: str
    fix: str = ""


def doctor(
    folder: Annotated[Path, typer.Option("--dir", help="Where runs will be written.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Versions, torch build, device, threads, disk space, optional parts: each ok, or a problem with its fix."""
    findings = list(examine(folder))
    problems = [f for f in findings if f.state == "problem"]
    if as_json:
        echo_json({"ok": not problems, "findings": [asdict(f) for f in findings]})
    else:
        for finding in findings:
            typer.echo(f"{MARKS[finding.state]}{finding.name}: {finding.detail}")
            if finding.fix:
                typer.echo(f"          fix: {finding.fix}")
        typer.echo(f"{len(problems)} problem{'' if len(problems) == 1 else 's'} found")
    if problems:
        raise typer.Exit(1)


def examine(folder: Path) -> Iterator[Finding]:
    """Every finding, in the order in which they are shown."""
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    extras = [e for e in metadata.metadata("tutelage").get_all("Provides-Extra") or [] if e != "dev"]
    yield from packages(metadata.requires("tutelage") or [], extras, metadata.version)
    yield from torch_findings()
    yield disk(folder)


def packages(requirements: list[str], extras: list[str], version_of: Callable[[str], str]) -> Iterator[Finding]:
    """One finding per required package, and one per optional one: is it there, and in a version that works."""
    from packaging.requirements import Requirement

    for requirement in (Requirement(text) for text in requirements):
        marker = requirement.marker
        needed = marker is None or marker.evaluate({"extra": ""})
        extra = None if needed or marker is None else next((e for e in extras if marker.evaluate({"extra": e})), None)
        if not needed and extra is None:
            continue
        where = (
            f"pip install 'tutelage[{extra}]'" if extra else f"pip install '{requirement.name}{requirement.specifier}'"
        )
        name = f"{requirement.name} (optional)" if extra else requirement.name
        try:
            version = version_of(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "absent" if extra else "problem", "not installed", where)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "problem", f"{version}, but {requirement.specifier} is needed", where)


def torch_findings() -> Iterator[Finding]:
    """The build of torch, the device it finds, and its threads."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch build", "problem", f"torch cannot be imported: {error}", "reinstall with `make demo`")
        return
    gpu = has_nvidia_gpu()
    cuda = torch.version.cuda
    build = f"CUDA {cuda}" if cuda else "CPU"
    if gpu and not cuda:
        yield Finding("torch build", "problem", "CPU build on a machine with a GPU", "install the CUDA build of torch")
    elif cuda and not gpu:
        yield Finding("torch build", "ok", f"{build} (no GPU here: the CPU build would be smaller)")
    else:
        yield Finding("torch build", "ok", build)
    if torch.cuda.is_available():
        yield Finding("device", "ok", f"cuda: {torch.cuda.get_device_name(0)}")
    elif gpu and cuda:
        yield Finding("device", "problem", "the GPU is not usable by torch", "check the driver with nvidia-smi")
    else:
        yield Finding("device", "ok", "cpu")
    yield threads(torch.get_num_threads(), usable_cpus())


def threads(used: int, cpus: int) -> Finding:
    """More threads than processors wait for each other."""
    if used > cpus:
        fix = f"set OMP_NUM_THREADS={cpus}"
        return Finding("threads", "problem", f"torch uses {used} threads on {cpus} processors", fix)
    return Finding("threads", "ok", f"{used} of {cpus} processors")


def usable_cpus() -> int:
    """Processors this process may use, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA device is visible, without asking torch."""
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))


def disk(folder: Path, needed: int = DISK_NEEDED) -> Finding:
    """Free space where runs go, and whether they can be written."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        return Finding("disk", "problem", f"{existing} cannot be written", "choose another output_dir")
    free = shutil.disk_usage(existing).free
    detail = f"{free / 1e9:.1f} GB free at {existing}"
    if free < needed:
        return Finding("disk", "problem", detail, f"free {(needed - free) / 1e9:.1f} GB, or choose another output_dir")
    return Finding("disk", "ok", detail)
