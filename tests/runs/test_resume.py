"""A run that stopped goes on from its last checkpoint and ends where the uninterrupted one ended, bit for bit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tutelage.build import resume_run
from tutelage.errors import CheckpointError
from tutelage.mirror import fetch
from tutelage.native.build import described
from tutelage.reports.metrics_log import read_events, read_metrics

VOLATILE = ("time", "memory/")


def lasting(folder):
    """Metrics by step without what depends on the clock or the machine."""
    rows = read_metrics(folder)
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows]


def stop_after_step_2(folder):
    """What `kill -9` during step 3 leaves: the checkpoint of step 2, later metrics, no summary."""
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    shutil.rmtree(folder / "checkpoints" / "best")
    (folder / "summary.json").unlink()
    (folder / "checkpoints" / ".step_000004.partial").mkdir()


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["kl.controller=adaptive", "kl.target=0.5", "kl.horizon=100"],
        ["model.lora_rank=4"],
    ],
    ids=["full", "adaptive", "lora"],
)
def test_a_resumed_ppo_run_repeats_the_rest_exactly(run, ppo_overrides, extra):
    result = run("ppo", *ppo_overrides, "checkpoint.every=2", *extra)
    metrics = lasting(result.folder)
    weights = {
        r: load_file(result.folder / f"checkpoints/step_000004/{r}/rank_00000.safetensors") for r in ("actor", "critic")
    }
    stop_after_step_2(result.folder)
    again = resume_run(result.folder, "plain")
    assert again.summary["steps"] == 4
    assert again.summary["after"] == result.summary["after"]
    assert lasting(result.folder) == metrics
    for role, before in weights.items():
        after = load_file(result.folder / f"checkpoints/step_000004/{role}/rank_00000.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert [e for e in read_events(result.folder) if e["kind"] == "resume"]


def test_a_run_that_its_kl_budget_stopped_stays_stopped(run, ppo_overrides):
    result = run("ppo", *ppo_overrides, "kl.budget=1e-6", "kl.on_budget=stop", "optim.lr=1e-2")
    assert result.summary["stopped"]
    assert result.summary["steps"] < 4
    (result.folder / "summary.json").unlink()
    again = resume_run(result.folder, "plain")
    assert again.summary["steps"] == result.summary["steps"]
    assert again.summary["stopped"] == result.summary["stopped"]


def test_a_finished_run_resumes_to_the_same_summary(run, files, tiny_llama_folder):
    result = run("sft", f"model.path={tiny_llama_folder}", f"data.train={files['demonstrations']}", "sft.batch_size=8")
    again = resume_run(result.folder, "plain")
    assert again.summary["after"] == result.summary["after"]


def test_resume_refuses_other_data_than_the_run_began_with(run, files, tiny_llama_folder, tmp_path):
    data = tmp_path / "demonstrations.jsonl"
    shutil.copy(files["demonstrations"], data)
    result = run("sft", f"model.path={tiny_llama_folder}", f"data.train={data}", "sft.batch_size=8")
    (result.folder / "summary.json").unlink()
    data.write_text(data.read_text() + '{"prompt": "new", "completion": "row"}\n')
    with pytest.raises(CheckpointError, match=r"the data of .* changed since the run began"):
        resume_run(result.folder, "plain")


def test_resume_says_where_it_computes_otherwise_than_the_run_began(run, files, tiny_llama_folder):
    result = run("sft", f"model.path={tiny_llama_folder}", f"data.train={files['demonstrations']}", "sft.batch_size=8")
    (result.folder / "summary.json").unlink()
    lineage = result.folder / "lineage.json"
    found = json.loads(lineage.read_text())
    assert found["machine"]["kernels"] == described()
    found["machine"]["kernels"] = "none of c++ is found"
    lineage.write_text(json.dumps(found))
    with pytest.warns(UserWarning, match=r"began with CPU kernels: none of c\+\+ is found; now: "):
        resume_run(result.folder, "plain")


def test_resume_without_a_checkpoint_says_how_to_start_again(run, files, tiny_llama_folder):
    result = run("sft", f"model.path={tiny_llama_folder}", f"data.train={files['demonstrations']}", "sft.batch_size=8")
    shutil.rmtree(result.folder / "checkpoints")
    (result.folder / "summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint[\s\S]*tutelage run"):
        resume_run(result.folder, "plain")


def test_a_run_goes_on_from_its_copy_on_another_machine(run, files, tiny_llama_folder, tmp_path):
    """The copy alone, in another place; the rest of the run is the same to the bit."""
    store = tmp_path / "store"
    result = run(
        "sft",
        f"model.path={tiny_llama_folder}",
        f"data.train={files['demonstrations']}",
        "sft.batch_size=8",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        f"checkpoint.mirror=file://{store}",
    )
    copy = store / "sft"
    assert sorted(p.name for p in (copy / "checkpoints").iterdir()) == [f"step_{n:06d}" for n in (1, 2, 3, 4)]
    for later in (3, 4):
        shutil.rmtree(copy / "checkpoints" / f"step_{later:06d}")
    folder = fetch(f"file://{copy}", tmp_path / "elsewhere")
    again = resume_run(folder, "plain")
    assert again.summary["steps"] == result.summary["steps"] == 4
    assert lasting(folder) == lasting(result.folder)
