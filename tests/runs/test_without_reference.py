"""GRPO with kl.coef=0: no reference is built, and evaluation judges by the proxy alone."""

from __future__ import annotations

import json

import pytest

from tutelage.reports.metrics_log import read_metrics


@pytest.fixture(scope="module")
def settings(files, tiny_llama_folder) -> list[str]:
    return [
        f"model.path={tiny_llama_folder}",
        f"data.train={files['prompts']}",
        "reward.rules=[{function: 'length_range(low=2)'}]",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=4",
        "evaluation.prompts=3",
        "max_steps=1",
    ]


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_the_reference_is_asked_only_where_the_loss_has_a_kl_term(coef, run, settings):
    result = run("grpo", *settings, f"kl.coef={coef}")
    names = {name for row in read_metrics(result.folder) for name in row}
    kl = {"eval/kl_sequence", "kl/sequence", "kl/token", "policy/kl_loss", "reward/non_score", "reward/rlhf"}
    assert names & kl == (kl if coef else set())
    assert {"eval/proxy_mean", "eval/length_mean", "eval/truncated_fraction"} <= names
    assert ("time/tokens_per_s/reference" in names) == (coef > 0)
    samples = [json.loads(line) for line in (result.folder / "samples" / "after.jsonl").read_text().splitlines()]
    assert len(samples) == 3
    assert all((sample["ref_logp_per_token"] is None) == (coef == 0) for sample in samples)
    best = json.loads((result.folder / "checkpoints" / "best" / "quality.json").read_text())
    after = result.summary["after"]
    if coef:
        assert best["measured_by"] == "eval/proxy_mean - 0.1 * eval/kl_sequence"
        assert best["quality"] == pytest.approx(after["eval/proxy_mean"] - 0.1 * after["eval/kl_sequence"])
    else:
        assert best["measured_by"] == "eval/proxy_mean"
        assert best["quality"] == after["eval/proxy_mean"]
    assert (result.folder / "report.html").is_file()
