"""Clocks: interleaved rounds of stages, the matrix multiply rate beside them, and the memory of one stage alone."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from workload import STAGES, Dtype, Sizes, Stage, Workload

from tutelage.build.device import device
from tutelage.models.precision import DTYPES

Clock = Literal["elapsed", "processor"]

SQUARE = 2048
PROBE_SECONDS = 0.15
"""A probe of the multiply rate repeats its product until this long has passed."""


@dataclass
class Timing:
    """elapsed: seconds of each repeat; processor: this process's processor time in them; by: which of them counts."""

    by: Clock = "elapsed"
    elapsed: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return self.elapsed if self.by == "elapsed" else self.processor

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def cores(self) -> float:
        """Cores that this process had on average; below its threads where other work ran, or where a stage waits."""
        return sum(self.processor) / sum(self.elapsed)


@dataclass(frozen=True)
class Memory:
    """Bytes of a process that runs one stage twice: after imports, at its peak, and the peak on a GPU (0 without)."""

    imports: int
    peak: int
    device_peak: int


def clock(run: Callable[[], object]) -> tuple[float, float]:
    """(seconds, processor seconds); a GPU's queue is empty at both ends."""
    _synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    _synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def _synchronize() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


class Multiply:
    """(m, k) @ (k, n) in the compute precision: 2 m k n FLOPs."""

    def __init__(self, m: int, k: int, n: int, dtype: Dtype) -> None:
        self.name = f"{m} x {k} x {n}"
        self.flops = 2 * m * k * n
        generator = torch.Generator().manual_seed(0)
        self.left = torch.randn(m, k, generator=generator).to(device(), DTYPES[dtype])
        self.right = torch.randn(k, n, generator=generator).to(device(), DTYPES[dtype])
        self.out = self.left @ self.right

    def rate(self, by: Clock = "elapsed", at_least: float = PROBE_SECONDS) -> float:
        """FLOP/s over as many products as take about `at_least` seconds."""
        column = 0 if by == "elapsed" else 1

        def run(times: int) -> None:
            for _ in range(times):
                torch.mm(self.left, self.right, out=self.out)

        once = clock(lambda: run(1))[column]
        times = max(1, round(at_least / max(once, 1e-6)))
        return times * self.flops / clock(lambda: run(times))[column]


def model_products(workload: Workload) -> list[tuple[int, int, int]]:
    """The stages' own shapes: N tokens by the MLP's matrix, R positions by the output layer."""
    config, sequences = workload.config, workload.sequences()
    hidden, wide = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    tokens, responses = int(sequences.tokens.lens.sum()), int(sequences.response_lens.sum())
    return [(tokens, hidden, wide), (responses, hidden, config.vocab_size)]


def interleaved(
    stages: Sequence[Stage], probe: Multiply, repeat: int, by: Clock = "elapsed"
) -> tuple[dict[str, Timing], list[float]]:
    """Every stage once to warm up, then `repeat` rounds of all stages in turn, the multiply rate before each of them.

    In turn, so that what slows the machine for a while slows every stage and the rate alike.
    """
    for stage in stages:
        stage.run()
    timings, rates = {stage.name: Timing(by) for stage in stages}, []
    for _ in range(repeat):
        for stage in stages:
            rates.append(probe.rate(by))
            less = clock(stage.less) if stage.less is not None else (0.0, 0.0)
            whole = clock(stage.run)
            timings[stage.name].elapsed.append(whole[0] - less[0])
            timings[stage.name].processor.append(whole[1] - less[1])
    return timings, rates


def peak_rss() -> int:
    """Bytes: the largest resident size of this process.

    From /proc where there is one: ru_maxrss of a started process begins at the size of the process that started it.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def stage_memory(name: str, folder: Path, sizes: Sizes, dtype: Dtype, threads: int) -> Memory:
    """Runs the stage in a process of its own, which loads the models that this stage needs and no other."""
    request = {"name": name, "folder": str(folder), "sizes": asdict(sizes), "dtype": dtype, "threads": threads}
    command = [sys.executable, str(Path(__file__).resolve()), json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def own_memory(name: str, folder: Path, sizes: Sizes, dtype: Dtype) -> Memory:
    """In this process: the stage twice, since the optimiser's moments exist from the first update on."""
    imports = peak_rss()
    stage = STAGES[name](Workload(folder, sizes, dtype))
    for _ in range(2):
        stage.run()
    return Memory(imports, peak_rss(), torch.cuda.max_memory_allocated() if device() == "cuda" else 0)


def _main(request: str) -> None:
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    bounds = {key: tuple(value) for key, value in asked["sizes"].items() if isinstance(value, list)}
    sizes: dict[str, Any] = {**asked["sizes"], **bounds}
    print(json.dumps(asdict(own_memory(asked["name"], Path(asked["folder"]), Sizes(**sizes), asked["dtype"]))))


if __name__ == "__main__":
    _main(sys.argv[1])
