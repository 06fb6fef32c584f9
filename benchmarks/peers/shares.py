"""Shares of the measured multiply rate, in a process of its own: training, prefill and decode at batch 64."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers.works import SHARE_GOALS

BENCHMARKS = Path(__file__).resolve().parents[1]
TRAINING, GENERATING, NEW_TOKENS = 16, 64, 16
"""Sequences of the update, and of prefill and decode; tokens sampled of each."""


def measured(source: Any, repeat: int, clock: str, quick: bool) -> dict[str, Any]:
    """{stage: {share, goal, seconds, gflops}} and the rate."""
    request = {
        "model": str(source.model),
        "dtype": source.dtype,
        "threads": source.threads,
        "seed": source.seed,
        "repeat": repeat,
        "clock": clock,
        "sequences": [4, 8] if quick else [TRAINING, GENERATING],
        "new_tokens": 4 if quick else NEW_TOKENS,
    }
    threads = {"OMP_NUM_THREADS": str(source.threads)}
    command = [sys.executable, str(Path(__file__).resolve()), json.dumps(request)]
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **threads, "PYTHONPATH": path}
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def here(request: dict[str, Any]) -> dict[str, Any]:
    """The measurement itself: three stages and the square product, in turn."""
    import torch
    from measure import SQUARE, Multiply, interleaved
    from workload import STAGES, Sizes, Workload

    torch.set_num_threads(request["threads"])
    training, generating = request["sequences"]
    folder, seed, dtype = Path(request["model"]), request["seed"], request["dtype"]
    updating = Workload(folder, Sizes(sequences=training, seed=seed), dtype)
    answering = Workload(folder, Sizes(sequences=generating, new_tokens=request["new_tokens"], seed=seed), dtype)
    answering.__dict__["policy"] = updating.policy  # one set of weights for all stages
    stages = [STAGES["sft"](updating), STAGES["prefill"](answering), STAGES["decode"](answering)]
    timings, rates = interleaved(stages, Multiply(SQUARE, SQUARE, SQUARE, dtype), request["repeat"], request["clock"])
    rate = statistics.median(rates)
    rows = {}
    for stage in stages:
        seconds = timings[stage.name].median
        reached = stage.flops / seconds
        rows[stage.name] = {
            "batch": training if stage.name == "sft" else generating,
            "tokens": stage.tokens,
            "seconds": seconds,
            "gflops": reached / 1e9,
            "share": reached / rate,
            "goal": SHARE_GOALS[stage.name],
        }
    return {"rate": rate / 1e9, "stages": rows}


if __name__ == "__main__":
    print(json.dumps(here(json.loads(sys.argv[1]))))
