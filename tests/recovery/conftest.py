"""Short folders: the sockets of a Ray node lie in its folder, and their paths have at most 107 characters."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="two-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
