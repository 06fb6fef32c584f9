"""Bytes and seconds of moving weights between layouts, against the closed forms.

    python benchmarks/publication.py                  SmolLM2-135M's shapes, 4 gloo ranks on this machine
    python benchmarks/publication.py --json           the same as one JSON object
    python benchmarks/publication.py --dtype float32 --repeat 5

Weights are random numbers of the model's shapes: no model is loaded. Predicted bytes are from
`tutelage.transport.weights.formulas` alone; measured ones are counted where they enter and leave the collectives. Every
element of the target is compared with the one it should be.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from tutelage.layout import Layout
from tutelage.transport.weights import formulas
from tutelage.transport.weights.boxes import Placement, Weight
from tutelage.transport.weights.grouping import contiguous, generation_layout, strided
from tutelage.transport.weights.llama import SMOLLM2_135M, bytes_by_cut, llama_cuts, llama_weights
from tutelage.transport.weights.moving import BUCKET_BYTES, move
from tutelage.transport.weights.placements import on_ranks, placed
from tutelage.transport.weights.planning import Plan, plan

WORLD = 4
SECONDS = 120
"""A rank that waits longer for its peers fails."""


@dataclass(frozen=True)
class Pair:
    """predicted: bytes over all ranks, from the formulas; None where none is stated (vanilla grouping)."""

    name: str
    formula: str
    predicted: Fraction | None
    plan: Plan


@dataclass(frozen=True)
class Row:
    """Bytes over all ranks; most: the rank that receives most; seconds: of the slowest rank, the median of repeats."""

    pair: str
    formula: str
    predicted: int | None
    planned: int
    measured: int
    most: int
    seconds: float
    rounds: int


def pairs(weights: Mapping[str, Weight]) -> list[Pair]:
    """The layouts, source to target, on four ranks."""
    sizes = bytes_by_cut(weights)
    matrices, rest = sizes[0] + sizes[1], sizes[None]
    m = matrices + rest

    def source(layout: Layout, nested: bool = True) -> Placement:
        return placed(weights, layout, llama_cuts(weights, pipeline=layout.pipeline, nested=nested))

    def target(layout: Layout, tensor: int, group: Any = strided) -> Placement:
        after = generation_layout(layout, tensor=tensor)
        return placed(weights, after, llama_cuts(weights), numbers=group(layout, after))

    def here(layout: Layout, tensor: int, nested: bool = True, group: Any = strided) -> Plan:
        return plan(source(layout, nested), target(layout, tensor, group), weights)

    def there(layout: Layout, tensor: int) -> Plan:
        engine = on_ranks(target(Layout(replicate=tensor), tensor), {rank: 2 + rank for rank in range(tensor)})
        return plan(source(layout), engine, weights)

    f = formulas
    grouped = 4 * (f.grouped(matrices, 2, 2, 2, 1) + f.grouped(rest, 1, 2, 1, 1))
    whole_norms = f.nested(rest, 4, 1)
    nested = 4 * (f.nested(matrices, 4, 2) + whole_norms)
    by_rows = 4 * (f.nested(sizes[0], 4, 2) + f.crossing(sizes[1], 4, 2) + whole_norms)
    strided4 = 4 * f.grouped(matrices, 4, 1, 2, 1)
    engine = 2 * (f.elsewhere(matrices, 2) + f.elsewhere(rest, 1))
    hsdp = Layout(replicate=2, shard=2)
    return [
        Pair("TP2 x PP2 -> TP2", "(tp - t_g p_g)/(t_g p_g tp) M", grouped, here(Layout(pipeline=2, tensor=2), 2)),
        Pair("TP4 -> TP2, strided", "(tp - t_g p_g)/(t_g p_g tp) M", strided4, here(Layout(tensor=4), 2)),
        Pair("TP4 -> TP2, contiguous", "", None, here(Layout(tensor=4), 2, group=contiguous)),
        Pair("FSDP4 -> TP2, nested", "(1/t_g - 1/N) M", nested, here(Layout(shard=4), 2)),
        Pair("FSDP4 -> TP2, by rows", "nested, and (N-1)/(N t_g) M", by_rows, here(Layout(shard=4), 2, nested=False)),
        Pair("FSDP2 -> engine TP2", "M/t_g", engine, there(Layout(shard=2), 2)),
        Pair("HSDP 2x2 -> whole", "(1 - 1/N) M", 4 * f.nested(m, 2, 1), here(hsdp, 1)),
    ]


def made_up(weights: Mapping[str, Weight]) -> dict[str, Tensor]:
    """Random bits of each dtype's size; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    bits = {2: torch.int16, 4: torch.int32}
    found = {}
    for name, weight in weights.items():
        kind = bits[weight.itemsize]
        low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
        whole = torch.randint(low, high, weight.shape, generator=generator, dtype=kind)
        found[name] = whole.view(getattr(torch, weight.dtype))
    return found


def local_tensors(whole: Mapping[str, Tensor], placement: Placement, rank: int) -> dict[str, Tensor]:
    return {
        name: whole[name][tuple(slice(start, stop) for start, stop in blocks[0].box)].clone()
        for name, blocks in placement.get(rank, {}).items()
    }


def same_bits(one: Tensor, other: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def run_rank(rank: int, folder: str, dtype: str, repeat: int, bucket_bytes: int) -> None:
    """One process: every pair, `repeat` times after one that is not counted."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=SECONDS),
    )
    weights = llama_weights(SMOLLM2_135M, dtype)
    whole = made_up(weights)
    reports = []
    for pair in pairs(weights):
        local = local_tensors(whole, pair.plan.source, rank)
        times = []
        for _ in range(repeat + 1):
            dist.barrier()
            begin = time.perf_counter()
            moved = move(pair.plan, local, bucket_bytes=bucket_bytes)
            times.append(time.perf_counter() - begin)
        expected = local_tensors(whole, pair.plan.target, rank)
        wrong = [name for name, tensor in expected.items() if not same_bits(tensor, moved.tensors[name])]
        if wrong:
            raise SystemExit(f"{pair.name}: {wrong[0]} on rank {rank} is not what it should be")
        reports.append({"sent": moved.sent, "received": moved.received, "seconds": times[1:], "rounds": moved.rounds})
        del moved, expected, local
    (Path(folder) / f"rank_{rank}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()


def measure(dtype: str, repeat: int, bucket_bytes: int) -> list[Row]:
    """Runs the ranks and joins what they report."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, folder, dtype, repeat, bucket_bytes)) for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            if any(process.exitcode not in (None, 0) for process in ranks):
                break
            time.sleep(0.05)
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed; its error is above")
        by_rank = [json.loads((Path(folder) / f"rank_{rank}.json").read_text()) for rank in range(WORLD)]
    rows = []
    for pair, reports in zip(pairs(llama_weights(SMOLLM2_135M, dtype)), zip(*by_rank, strict=True), strict=True):
        slowest = [max(times) for times in zip(*(report["seconds"] for report in reports), strict=True)]
        received = [report["received"] for report in reports]
        if sum(received) != sum(report["sent"] for report in reports):
            raise SystemExit(f"{pair.name}: bytes sent and received differ")
        predicted = None if pair.predicted is None else int(pair.predicted)
        rows.append(
            Row(
                pair.name,
                pair.formula,
                predicted,
                pair.plan.wire_bytes,
                sum(received),
                max(received),
                statistics.median(slowest),
                reports[0]["rounds"],
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown; bytes over all ranks."""
    lines = [
        "| layouts | received by a rank | predicted bytes | measured | difference | most, a rank | median s | rounds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        predicted = "-" if row.predicted is None else f"{row.predicted:,}"
        difference = "-" if row.predicted is None else f"{row.measured - row.predicted:,}"
        lines.append(
            f"| {row.pair} | {row.formula or '-'} | {predicted} | {row.measured:,} | {difference} | {row.most:,} "
            f"| {row.seconds:.3f} | {row.rounds} |"
        )
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=2, help="moves after the first, which is not counted")
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES, help="staging of a rank, both ways together")
    found = parser.parse_args(argv)
    if found.repeat < 1 or found.bucket_bytes < 8:
        parser.error("--repeat is at least 1, --bucket-bytes at least 8")
    return found


def main() -> int:
    asked = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    begin = time.perf_counter()
    rows = measure(asked.dtype, asked.repeat, asked.bucket_bytes)
    total = sum(weight.nbytes for weight in llama_weights(SMOLLM2_135M, asked.dtype).values())
    head = {"model": "SmolLM2-135M shapes", "dtype": asked.dtype, "M": total, "ranks": WORLD, "backend": "gloo"}
    head |= {"bucket_bytes": asked.bucket_bytes, "repeat": asked.repeat, "seconds": time.perf_counter() - begin}
    if asked.json:
        print(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in head.items()) + "\n")
        print(table(rows))
    exact = all(row.planned == row.measured == (row.predicted or row.planned) for row in rows)
    if not exact:
        print("measured bytes differ from the prediction", file=sys.stderr)
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
