"""Run folders written by hand, line by line: readers are tested against the format, not against our writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeRun = Callable[..., Path]

CONFIG = """algorithm: ppo
name: run_a
seed: 3
kl:
  coef: 0.05
  controller: fixed
  budget: 8.0
alarms:
  kl: 10.0
  clip_fraction: 0.2
rollout:
  max_new_tokens: 32
"""


def ppo_record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "time": 1.0 * step,
        "reward/score_mean": 0.1 * step,
        "kl/sequence": 0.5 * step,
        "policy/entropy": 2.0 - 0.05 * step,
        "policy/clip_fraction": 0.1,
        "value/error": 1.0 / step,
        "rollout/length_mean": 10.0 + step,
    }


def sample(i: int, phase: str, **changes: Any) -> dict[str, Any]:
    """Answers of different words and 10 to 13 tokens, proxy 0 before and 1 after (plus a little), gold 0.5 and 0.7."""
    late = phase == "after"
    words = [f"w{(i * 7 + 3 * k) % 41}x{k}" for k in range(10 + i % 4)]
    record = {
        "id": f"p{i}",
        "prompt": f"Question {i}?",
        "response": " ".join(words),
        "proxy": (1.0 if late else 0.0) + 0.01 * (i % 5),
        "gold": (0.7 if late else 0.5) + 0.01 * (i % 3),
        "length": 10 + i % 4,
        "finished": True,
        "ref_logp_per_token": -1.5 - 0.02 * (i % 6),
        "phase": phase,
    }
    return {**record, **changes}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run(metrics=, before=, after=, events=, config=) -> the folder; what is not given is that of a PPO run."""

    def make(
        metrics: list[dict[str, Any]] | None = None,
        before: list[dict[str, Any]] | None = None,
        after: list[dict[str, Any]] | None = None,
        events: list[dict[str, Any]] | None = None,
        config: str = CONFIG,
    ) -> Path:
        folder = tmp_path / "run_a"
        write_lines(folder / "metrics.jsonl", [ppo_record(s) for s in range(1, 7)] if metrics is None else metrics)
        write_lines(folder / "events.jsonl", events or [])
        for name, rows in (("before", before), ("after", after)):
            write_lines(
                folder / "samples" / f"{name}.jsonl", [sample(i, name) for i in range(12)] if rows is None else rows
            )
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        return folder

    return make


@pytest.fixture
def make_sample() -> Callable[..., dict[str, Any]]:
    """make_sample(i, phase, **changes): one line of samples/PHASE.jsonl."""
    return sample
