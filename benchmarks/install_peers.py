"""Installs what Tutelage is compared with: TRL, each version in an environment of its own under `.peers/`.

    python benchmarks/install_peers.py            every version that is missing
    python benchmarks/install_peers.py 1.16.0     that one

An environment sees the packages of the project's `.venv` (torch, transformers, numpy), so both sides of a comparison
run the same versions of them; nothing is ever installed into `.venv` itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"
VERSIONS = ("1.16.0", "1.8.0")
BESIDES = ("datasets>=4.7", "pyarrow>=21", "pandas", "jinja2", "scikit-learn", "joblib")
"""What TRL imports; those that `.venv` has already are not installed again."""


def python_of(version: str) -> Path:
    return PEERS / f"trl-{version}" / "bin" / "python"


def install(version: str) -> None:
    """Make the environment of one version, whole or not at all."""
    folder = PEERS / f"trl-{version}"
    shared = next((ROOT / ".venv" / "lib").glob("python3*/site-packages"))
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    own = next((folder / "lib").glob("python3*/site-packages"))
    (own / "shared.pth").write_text(f"{shared}\n", encoding="utf8")
    pip = [str(python_of(version)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *BESIDES], check=True)
    subprocess.run([*pip, "--no-deps", f"trl=={version}"], check=True)
    check = "import torch, transformers, trl; print(trl.__version__, torch.__version__, transformers.__version__)"
    subprocess.run([str(python_of(version)), "-c", check], check=True)


def main(wanted: list[str]) -> None:
    for version in wanted or [v for v in VERSIONS if not python_of(v).exists()]:
        print(f"TRL {version}: {PEERS / f'trl-{version}'}")
        install(version)


if __name__ == "__main__":
    main(sys.argv[1:])
