"""What an error says, and whether a package is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutelage.errors import ConfigError, installed


def test_a_folder_without_an_init_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some_engine"
    folder.mkdir()
    (folder / "part.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("some_engine")
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("some_engine")
    assert not installed("some_other_engine")


def test_the_fix_stands_on_its_own_line() -> None:
    error = ConfigError("a.b is 3", fix="use 4")
    assert str(error) == "a.b is 3\n  fix: use 4"
    assert isinstance(error, ValueError)
