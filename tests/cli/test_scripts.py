"""The installer's decisions and the README checker, without installing anything."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = script("install")
    monkeypatch.delenv("TUTELAGE_TORCH", raising=False)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp.json")
    return module


def test_linux_without_a_gpu_only_ever_tries_the_cpu_build(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: False)
    attempts = install.torch_attempts("2.13.0")
    assert [args[0] for args in attempts] == ["torch==2.13.0+cpu"] * 2
    assert attempts[0] == ["torch==2.13.0+cpu"]
    assert attempts[1][1:] == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


@pytest.mark.parametrize(("system", "gpu"), [("Linux", True), ("Darwin", False)])
def test_elsewhere_the_plain_build_is_taken(
    install: Any, monkeypatch: pytest.MonkeyPatch, system: str, gpu: bool
) -> None:
    monkeypatch.setattr(install.platform, "system", lambda: system)
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: gpu)
    assert install.torch_attempts("2.13.0") == [["torch==2.13.0"]]


def test_the_user_can_name_another_torch(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTELAGE_TORCH", "torch==2.14.0 --index-url https://example.org/simple")
    assert install.torch_attempts("2.13.0") == [["torch==2.14.0", "--index-url", "https://example.org/simple"]]
    install.VENV.mkdir()
    assert "torch==" not in install.constraints().read_text()
    assert "transformers==" in install.constraints().read_text()


def test_when_no_cpu_build_is_found_it_stops_and_says_how_to_override(
    install: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[tuple[str, ...]] = []

    def no(*args: str) -> Any:
        tried.append(args)
        return subprocess.CompletedProcess(args, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(install, "installed_torch", lambda: "")
    monkeypatch.setattr(install, "pip", no)
    with pytest.raises(SystemExit) as stop:
        install.install_torch()
    assert stop.value.code == 1
    assert len(tried) == 2
    assert all("+cpu" in " ".join(args) for args in tried)
    said = capsys.readouterr().err
    assert "No matching distribution found" in said
    assert 'TUTELAGE_TORCH="torch==' in said


def test_the_torch_that_is_there_is_kept(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = install.torch_attempts(install.locked_torch())[0][0].partition("==")[2]
    monkeypatch.setattr(install, "installed_torch", lambda: version)
    monkeypatch.setattr(install, "pip", lambda *args: pytest.fail("nothing to install"))
    install.install_torch()


def test_the_stamp_covers_lock_project_and_what_was_installed(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not install.up_to_date(dev=False)
    install.VENV.mkdir()
    monkeypatch.setattr(install, "venv_python", lambda: Path(sys.executable))
    install.STAMP.write_text(f'{{"fingerprint": "{install.fingerprint()}", "dev": false}}')
    assert install.up_to_date(dev=False)
    assert not install.up_to_date(dev=True)
    monkeypatch.setenv("TUTELAGE_TORCH", "torch==1")
    assert not install.up_to_date(dev=False)


def test_an_old_python_is_refused_in_words(
    install: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 1, "final", 0))
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit):
        install.require_python()
    assert "Python 3.11 or newer is needed" in capsys.readouterr().err


def test_the_lock_pins_every_direct_dependency() -> None:
    names = {re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    project = (ROOT / "pyproject.toml").read_text()
    wanted = re.search(r"^dependencies = \[(.*?)^\]", project, flags=re.MULTILINE | re.DOTALL)
    assert wanted is not None
    direct = re.findall(r'"([A-Za-z0-9_.-]+)', wanted.group(1))
    assert len(direct) > 5
    assert [name for name in direct if name.lower() not in names] == []
    assert "+cpu" not in (ROOT / "requirements.lock").read_text().replace("scripts", "")


def test_only_marked_blocks_of_the_readme_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(
        "```bash\nexit 9\n```\n\n<!-- checked -->\n```bash\necho one\nfalse | true\n```\n"
        "<!-- checked -->\n\n```bash\necho two\n```\n```bash\nexit 9\n```\n"
    )
    checker = script("check_readme")
    assert checker.marked_blocks(readme.read_text()) == ["echo one\nfalse | true\n", "echo two\n"]
    assert run_checker(readme) == 1
    assert "two" not in capfd.readouterr().out.replace("of 2", "")
    readme.write_text("<!-- checked -->\n```bash\necho fine\n```\n")
    assert run_checker(readme) == 0
    readme.write_text("```bash\necho fine\n```\n")
    assert run_checker(readme) == 1


def run_checker(readme: Path) -> int:
    command = [sys.executable, str(ROOT / "scripts" / "check_readme.py"), str(readme)]
    return subprocess.run(command, check=False).returncode
