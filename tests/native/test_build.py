"""The kernels are compiled once a machine; without a compiler the reason is said and torch's operators compute."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_kit import needs_compiler

from tutelage.errors import ConfigError
from tutelage.models import fused
from tutelage.native import build, ops


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """An empty cache, and a process that has not looked for kernels yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.SWITCH, raising=False)
    build.kernels.cache_clear()
    yield
    build.kernels.cache_clear()


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_torch_computes_and_the_reason_and_the_fix_are_said(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match=r"no-such-compiler.*g\+\+ or clang\+\+"):
        found = build.kernels()
    assert found.library is None
    x, w = torch.randn(3, 8).bfloat16(), torch.ones(8).bfloat16()
    assert not ops.takes(x, w)
    assert fused.rms_norm(x, w, 1e-5).shape == (3, 8)


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(
        "CXX", script(tmp_path, '[ "$1" = --version ] && echo 1 && exit 0\necho no OpenMP here >&2; exit 3')
    )
    with pytest.warns(UserWarning, match="ended with 3: no OpenMP here"):
        assert build.kernels().library is None
    assert not list((tmp_path / "cache" / "tutelage").glob("*"))


def test_where_they_are_required_their_absence_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(build.SWITCH, "required")
    with pytest.raises(ConfigError, match=r"required.*no-such-compiler"):
        build.kernels()


def test_another_value_of_the_switch_is_refused(monkeypatch) -> None:
    monkeypatch.setenv(build.SWITCH, "no")
    with pytest.raises(ConfigError, match="TUTELAGE_KERNELS is 'no'"):
        build.kernels()


def test_switched_off_nothing_is_compiled(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(build.SWITCH, "off")
    assert build.kernels().library is None
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_what_was_compiled_once_is_found_again(tmp_path, capfd) -> None:
    assert build.kernels().library is not None
    assert "compiling the CPU kernels" in capfd.readouterr().err
    (made,) = (tmp_path / "cache" / "tutelage").iterdir()
    assert made.suffix == ".so"
    build.kernels.cache_clear()
    assert build.kernels().library is not None
    assert capfd.readouterr().err == ""


@needs_compiler
def test_other_flags_are_another_library(monkeypatch, tmp_path) -> None:
    assert build.kernels().library is not None
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    build.kernels.cache_clear()
    assert build.kernels().library is not None
    assert len(list((tmp_path / "cache" / "tutelage").iterdir())) == 2


@needs_compiler
def test_processes_may_compile_at_the_same_time(tmp_path) -> None:
    code = "from tutelage.native.build import kernels; assert kernels().library is not None, kernels().why"
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=dict(os.environ)) for _ in range(3)
    ]
    errors = [run.communicate()[1].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], errors
    assert len(list((tmp_path / "cache" / "tutelage").iterdir())) == 1


@needs_compiler
def test_the_compiler_may_be_named_with_what_belongs_before_it(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "env " + build.compiler_command()[0])
    assert build.kernels().library is not None
    assert build.described() == ("a GPU computes" if torch.cuda.is_available() else "compiled")


def test_a_user_without_a_home_has_a_temporary_folder(monkeypatch, tmp_path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(build.Path, "home", no_home)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    assert build.cache_folder() == tmp_path / f"tutelage-{os.getuid()}"


def test_a_cache_that_cannot_be_written_gives_way_to_a_temporary_folder(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    assert build.cache_folder() == tmp_path / f"tutelage-{os.getuid()}"
