"""Several ranks on one machine: a function run by every process of a gloo group, its results in the order of the ranks.

Processes are forked from a server that has the heavy imports done, so a run costs about a second, not ten.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

PRELOAD = ("torch", "torch.distributed.fsdp", "transformers", "peft", "tutelage.engines.engine", "tutelage.models.load")


def _context() -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def _rank(function: Callable[..., Any], rank: int, world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    home = Path(folder)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{home / 'store'}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
        torch.save(function(rank, world, *args), home / f"result_{rank}.pt")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        (home / f"error_{rank}.txt").write_text(traceback.format_exc())
        raise


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 240) -> list[Any]:
    """function(rank, world, *args) in `world` processes; a module-level function, arguments and results picklable.

    Fails with the first rank's traceback as soon as one rank failed, and after `timeout` seconds.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(function, rank, world, folder, args), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            while any(p.is_alive() for p in processes):
                failed = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0)]
                if failed or time.monotonic() > deadline:
                    time.sleep(0.5)
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        errors = sorted(Path(folder).glob("error_*.txt"))
        if errors:
            raise AssertionError("\n".join(f"{e.stem}:\n{e.read_text()}" for e in errors[:2]))
        results = [Path(folder) / f"result_{rank}.pt" for rank in range(world)]
        if not all(path.exists() for path in results):
            raise AssertionError(f"{world} ranks did not finish within {timeout} s")
        return [torch.load(path, weights_only=False) for path in results]
