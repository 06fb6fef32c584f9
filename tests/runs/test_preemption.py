"""SIGTERM in the middle of a step: the step is finished, a checkpoint written, and the run resumes bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tutelage.algorithms import sft
from tutelage.build import RunResult, resume_run
from tutelage.build.preemption import on_sigterm
from tutelage.errors import PreemptedError
from tutelage.reports.metrics_log import read_events, read_metrics

VOLATILE = ("time", "memory/")
IN_STEP_3 = """
import sys, time
from pathlib import Path
from tutelage.algorithms import sft
from tutelage.cli import main

entered, go_on = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
learn = sft.learn

def held(batch, roles, cfg, state):
    if state.step == 2:
        entered.touch()
        while not go_on.exists():
            time.sleep(0.01)
    return learn(batch, roles, cfg, state)

sft.learn = held
main()
"""
STALLED_S = 300


def lasting(folder: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in read_metrics(folder)]


@pytest.fixture
def settings(files, tiny_llama_folder) -> list[str]:
    return [
        f"model.path={tiny_llama_folder}",
        f"data.train={files['demonstrations']}",
        "sft.batch_size=8",
        "sft.epochs=2",
        "max_steps=5",
        "optim.lr=3e-3",
    ]


def start(folder: Path, settings: list[str]) -> tuple[subprocess.Popen, Path]:
    """A run in a process of its own, which waits inside its third step for a file."""
    recipe, entered, go_on = folder / "recipe.yaml", folder / "entered", folder / "go_on"
    recipe.write_text("algorithm: sft\nname: sft\n")
    args = [sys.executable, "-c", IN_STEP_3, str(entered), str(go_on), "run", str(recipe), f"output_dir={folder}"]
    process = subprocess.Popen([*args, *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + STALLED_S
    while not entered.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError("\n".join(process.communicate()))
        time.sleep(0.02)
    return process, go_on


def require_resumes_as_the_uninterrupted(folder: Path, whole: RunResult) -> None:
    """Metrics, weights and moments, bit for bit."""
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000003"]
    assert not (folder / "summary.json").exists()
    assert [e["message"][:12] for e in read_events(folder) if e["kind"] == "error"] == ["SIGTERM came"]
    again = resume_run(folder, "plain")
    assert again.summary["steps"] == whole.summary["steps"] == 5
    assert again.summary["after"] == whole.summary["after"]
    assert lasting(folder) == lasting(whole.folder)
    ours, theirs = (
        load_file(path / "checkpoints" / "step_000005" / "actor" / "rank_00000.safetensors")
        for path in (folder, whole.folder)
    )
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("moments/") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_signal_in_step_3_is_a_preempted_error_after_it(run, settings, monkeypatch, tmp_path):
    whole, learn = run("sft", *settings), sft.learn

    def struck(batch, roles, cfg, state):
        if state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(batch, roles, cfg, state)

    with monkeypatch.context() as patched:
        patched.setattr(sft, "learn", struck)
        with pytest.raises(PreemptedError, match="SIGTERM came after step 3 of 5") as caught:
            run("sft", *settings, f"output_dir={tmp_path}")
    assert caught.value.fix == f"tutelage resume {tmp_path / 'sft'}"
    require_resumes_as_the_uninterrupted(tmp_path / "sft", whole)


@pytest.mark.slow
def test_sigterm_finishes_the_step_writes_a_checkpoint_and_leaves(run, settings, tmp_path):
    process, go_on = start(tmp_path, settings)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None, "the step is not cut"
    go_on.touch()
    out, err = process.communicate(timeout=STALLED_S)
    assert process.returncode == 1
    assert "PreemptedError: SIGTERM came after step 3 of 5; everything up to it is in a checkpoint" in out + err
    folder = tmp_path / "sft"
    assert f"tutelage resume {folder}" in (out + err).replace("\n", "")
    require_resumes_as_the_uninterrupted(folder, run("sft", *settings))


@pytest.mark.slow
def test_a_second_sigterm_ends_the_process_at_once(settings, tmp_path):
    process, _ = start(tmp_path, settings)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=STALLED_S)
    assert process.returncode == -signal.SIGTERM


def test_the_signal_is_as_before_afterwards_and_other_threads_are_left_alone():
    seen: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append("mine"))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with on_sigterm(seen.append):
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == ["SIGTERM came"]
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == ["SIGTERM came", "mine"]
        with pytest.raises(KeyError), on_sigterm(seen.append):
            raise KeyError
        assert signal.getsignal(signal.SIGTERM) is mine

        def elsewhere() -> None:
            with on_sigterm(seen.append):
                seen.append("in a thread")

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen[-1] == "in a thread"
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
