#!/usr/bin/env python3
"""PPO and GRPO under every placement: seconds a step, tokens/s, peak memory, KL and reward at the end, in one table.

    python benchmarks/placements.py --model FOLDER --prompts FILE [--steps 4] [--only NAME ...] [--json FILE]

The same recipe each time; only where its roles run and when it generates differ.  Memory is the largest sum of resident
sets (proportional set size where the system tells it) over all processes of a run, Ray's own included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

RAY = ("cluster.transport=ray", "cluster.start_timeout=120")
SPLIT = (
    *RAY,
    "cluster.pools={main: {per_device: 0.5}, gen: {per_device: 0.5}}",
    "cluster.place.rollout=gen",
)
VLLM = ("rollout.engine=vllm", "rollout.vllm.kv_cache_memory_bytes=268435456", "rollout.vllm.max_model_len=512")
SEPARATE = (*SPLIT, *VLLM, "rollout.vllm.mode=separate")


@dataclass(frozen=True)
class Placement:
    name: str
    overrides: tuple[str, ...]


PLACEMENTS = (
    Placement("local, in process", ()),
    Placement("local, vLLM colocated", VLLM),
    Placement("Ray, vLLM colocated, sleep and wake", (*RAY, *VLLM, "rollout.vllm.sleep_level=1")),
    Placement("Ray, split pools", SEPARATE),
    Placement("Ray, split pools, one step off", (*SEPARATE, "schedule.kind=one_step_off")),
    Placement("Ray, split pools, asynchronous", (*SEPARATE, "schedule.kind=asynchronous", "schedule.max_staleness=2")),
)
BASE = (
    "model.lora_rank=8",
    "data.max_prompt_tokens=48",
    "data.max_bad_fraction=1.0",
    "data.limit=200",
    "rollout.max_new_tokens=16",
    "reward.rules=[{function: 'length_range(low=5, high=11)'}]",
    "optim.lr=1e-4",
    "optim.tokens_per_micro_batch=1024",
    "evaluation.prompts=2",
)
OWN = {
    "ppo": ("rollout.prompts_per_step=4", "ppo.epochs=1", "ppo.minibatches=1"),
    "grpo": ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"),
}


class Memory(threading.Thread):
    """The largest sum over a process and everything it started, sampled every half second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        total = 0
        try:
            processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.Error:
            return 0
        for process in processes:
            try:
                total += getattr(process.memory_full_info(), "pss", 0) or process.memory_info().rss
            except psutil.Error:
                continue
        return total


def run(algorithm: str, placement: Placement, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run as a user would start it; its metrics, and its memory from outside."""
    recipe = folder / f"{algorithm}.yaml"
    recipe.write_text(f"algorithm: {algorithm}\n")
    overrides = [
        f"model.path={args.model}",
        f"data.train={args.prompts}",
        f"output_dir={folder}",
        f"name={algorithm}",
        f"max_steps={args.steps}",
        *BASE,
        *OWN[algorithm],
        *placement.overrides,
    ]
    command = [str(Path(sys.executable).parent / "tutelage"), "run", str(recipe), *overrides, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    memory = Memory(process.pid)
    memory.start()
    output, _ = process.communicate()
    memory.over.set()
    wall = time.perf_counter() - start
    if process.returncode:
        return {"algorithm": algorithm, "placement": placement.name, "failed": output.strip().splitlines()[-6:]}
    run_folder = max(folder.glob(f"{algorithm}*/summary.json"), key=lambda path: path.stat().st_mtime).parent
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step_s" in line]
    warm = steps[1:] or steps
    bubbles = {key.rpartition("/")[2]: value for key, value in warm[-1].items() if key.startswith("time/bubble/")}
    return {
        "algorithm": algorithm,
        "placement": placement.name,
        "step_s": median(line["time/step_s"] for line in warm),
        "tokens_per_s": median(line["time/tokens_per_s"] for line in warm),
        "rollout_s": median(line.get("time/rollout_s", 0.0) for line in warm),
        "sync_s": median(line.get("time/sync_s", 0.0) for line in warm),
        "peak_gb": memory.peak / 1e9,
        "kl": steps[-1]["kl/sequence"],
        "reward": steps[-1]["reward/score_mean"],
        "logp_gap": max(line["policy/logp_gap"] for line in steps),
        "staleness": warm[-1].get("schedule/staleness_mean", 0.0),
        "bubble": bubbles,
        "wall_s": wall,
        "steps": len(steps),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| algorithm | placement | s/step | tokens/s | rollout s | sync s | idle share by pool | staleness | peak GB | "
        "KL at the end | reward at the end | sampler-trainer logprob gap | wall s |",
        "|---|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['algorithm']} | {row['placement']} | failed: {' '.join(row['failed'])} |")
            continue
        idle = ", ".join(f"{pool} {share:.0%}" for pool, share in row["bubble"].items())
        lines.append(
            f"| {row['algorithm']} | {row['placement']} | {row['step_s']:.1f} | {row['tokens_per_s']:.1f} | "
            f"{row['rollout_s']:.1f} | {row['sync_s']:.2f} | {idle} | {row['staleness']:.1f} | {row['peak_gb']:.1f} | "
            f"{row['kl']:.3f} | {row['reward']:.2f} | {row['logp_gap']:.1e} | {row['wall_s']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the policy")
    parser.add_argument("--prompts", required=True, help="a file with prompts, or pairs of which the prompts are used")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of each process")
    parser.add_argument("--only", nargs="*", default=[], help="placements, by their names")
    parser.add_argument("--algorithms", nargs="*", default=["ppo", "grpo"])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    for algorithm in args.algorithms:
        for placement in PLACEMENTS:
            if args.only and placement.name not in args.only:
                continue
            with tempfile.TemporaryDirectory() as place:
                rows.append(run(algorithm, placement, args, Path(place)))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
