"""Arguments of the demo modules that are run by themselves: a folder, and maybe a seed."""

from __future__ import annotations

import argparse
from pathlib import Path


def folder_and_seed(module: str, writes: str) -> tuple[Path, int]:
    """Of `python -m MODULE FOLDER [SEED]`; ends the process with its usage and exit code 2 for anything else."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Write {writes} into a folder.")
    parser.add_argument("folder", type=Path, help="is made where it does not exist")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="keys all randomness (default: 0)")
    given = parser.parse_args()
    return given.folder, given.seed
