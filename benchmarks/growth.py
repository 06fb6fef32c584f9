"""Time and memory of a GRPO step against response length, group size and batch: a table and a figure.

    python benchmarks/growth.py --model SMOLLM2 --hh HH.jsonl.gz --figure docs/results/figures/growth.png
    python benchmarks/growth.py --quick

A step: rollouts, logprobs of policy and reference, one update.  Each point is a process of its own, which runs the
step once uncounted and then --repeat times.  Every response has all its tokens.  Where the arithmetic is linear (tokens
times weights), twice the value takes at most about twice the time and twice the memory above that of the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

SERIES = {"length": "response tokens", "group": "responses to each prompt", "batch": "prompts"}
FIGURE = "growth.png"


@dataclass(frozen=True)
class Point:
    """A step of so many prompts, samples of each, and tokens of each sample; value: of the series."""

    series: str
    value: int
    prompts: int
    samples: int
    tokens: int


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face folder of the policy")
    add("--hh", type=Path, help="rows of hh-rlhf: the prompts")
    add("--length", type=int, nargs="*", default=[64, 128, 256, 512, 1024], help="response tokens")
    add("--group", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64], help="responses to each prompt")
    add("--batch", type=int, nargs="*", default=[8, 16, 32, 64, 128, 256], help="prompts")
    add("--tokens", type=int, default=32, help="response tokens of the points of group and batch")
    add("--few", type=int, nargs=2, default=[2, 2], metavar=("PROMPTS", "SAMPLES"), help="of the points of length")
    add("--longest", type=int, default=64, help="prompts of more tokens are left out")
    add("--repeat", type=int, default=3, help="steps of a point after the first, which is not counted")
    add("--threads", type=int, default=2)
    add("--clock", choices=("elapsed", "processor"), default="elapsed")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder of finished points, which are not run again; default: a temporary one")
    add("--figure", type=Path, default=Path(FIGURE), help=f"the PNG (default: {FIGURE})")
    add("--patience", type=float, default=3600.0, help="seconds until a point that says nothing is given up")
    add("--quick", action="store_true", help="a tiny random model, three points of each series, one step")
    if parser.parse_args(argv).quick:
        parser.set_defaults(length=[4, 8, 16], group=[1, 2, 4], batch=[2, 4, 8], tokens=4, repeat=1)
    return parser.parse_args(argv)


def points(args: argparse.Namespace) -> list[Point]:
    prompts, samples = args.few
    return [
        *(Point("length", n, prompts, samples, n) for n in args.length),
        *(Point("group", n, prompts, n, args.tokens) for n in args.group),
        *(Point("batch", n, n, 1, args.tokens) for n in args.batch),
    ]


def source_of(args: argparse.Namespace, scratch: Path) -> Any:
    from peers.inputs import Sizes, Source

    sizes = Sizes(prompts=max([*args.batch, args.few[0]]), longest=(args.longest,) * 3)
    model, hh = args.model, args.hh
    if args.quick:
        from workload import build_tiny_folder

        model, hh = build_tiny_folder(scratch / "tiny", hidden=64, layers=2), None
    elif model is None or hh is None or not model.expanduser().exists() or not hh.expanduser().exists():
        raise SystemExit(f"error: --model is {model}, --hh is {hh}\n  fix: give both, or --quick")
    else:
        model, hh = model.expanduser().resolve(), hh.expanduser().resolve()
    return Source(model, None, hh, None, scratch, args.dtype, args.threads, args.seed, sizes)


def measured(point: Point, source: Any, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The point, of the folder or run here: seconds of each step, its tokens, bytes above the imports."""
    from peers.inputs import rollout_step
    from peers.worker import Worker

    name = f"{point.series}-{point.value}"
    file, asked = out / f"{name}.json", json.loads(json.dumps([vars(point), args.repeat, args.threads, args.dtype]))
    if file.is_file():
        row: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        if row["asked"] == asked:
            return row
    spec = rollout_step(source, point.prompts, point.samples, point.tokens, estimator="reinforce_plus_plus")
    (source.scratch / f"{name}.json").write_text(json.dumps(spec), encoding="utf8")
    command = [sys.executable, str(HERE / "peers" / "tutelage_side.py"), str(source.scratch / f"{name}.json")]
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    worker = Worker(name, command, out / f"{name}.log", args.patience, threads)
    try:
        tokens = worker.reply()["first"]["tokens"]
        rounds = [worker.ask("run") for _ in range(args.repeat)]
        memory = worker.ask("end")
    finally:
        worker.close()
    key = "seconds" if args.clock == "elapsed" else "processor"
    seconds = [found[key] for found in rounds]
    own = memory["device_peak"] or memory["peak"] - memory["imports"]
    row = {**vars(point), "asked": asked, "tokens_in_all": tokens, "seconds": seconds, "own": own}
    file.write_text(json.dumps(row, indent=1), encoding="utf8")
    print(f"{name}: {statistics.median(seconds):.2f} s, {own / 1e6:.0f} MB", file=sys.stderr)
    return row


def exponents(rows: Sequence[dict[str, Any]], of: str) -> list[float | None]:
    """e of cost ~ value^e from each point to the next; None for the first."""
    costs = [statistics.median(row["seconds"]) if of == "seconds" else row["own"] for row in rows]
    found: list[float | None] = [None] * min(1, len(rows))
    for i in range(1, len(rows)):
        found.append(math.log(costs[i] / costs[i - 1]) / math.log(rows[i]["value"] / rows[i - 1]["value"]))
    return found


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    from peers.table import markdown

    cells = []
    for series in SERIES:
        of_series = [row for row in rows if row["series"] == series]
        both = zip(of_series, exponents(of_series, "seconds"), exponents(of_series, "own"), strict=True)
        for row, time, memory in both:
            median = statistics.median(row["seconds"])
            cells.append(
                [
                    SERIES[series],
                    str(row["value"]),
                    f"{row['prompts']} x {row['samples']} x {row['tokens']}",
                    str(row["tokens_in_all"]),
                    f"{median:.3g}",
                    f"{1e3 * median / row['tokens_in_all']:.3g}",
                    "" if time is None else f"{time:.2f}",
                    f"{row['own'] / 1e6:.0f}",
                    "" if memory is None else f"{memory:.2f}",
                ]
            )
    headings = (
        "against", "value", "prompts x samples x tokens", "tokens in all", "s", "ms a token", "exponent of time",
        "own MB", "exponent of memory",
    )  # fmt: skip
    return markdown(headings, cells)


def figure(rows: Sequence[dict[str, Any]]) -> bytes:
    """Time above, memory below, one column for each series; dashed: in proportion, through the last point."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from tutelage.reports.figures import DPI, STYLE, png

    names = [series for series in SERIES if any(row["series"] == series for row in rows)]
    with rc_context(STYLE):
        made = Figure(figsize=(4.2 * len(names), 7.0), dpi=DPI, layout="constrained")
        axes = made.subplots(2, len(names), squeeze=False)
        for column, series in enumerate(names):
            of_series = [row for row in rows if row["series"] == series]
            values = [row["value"] for row in of_series]
            costs = ([statistics.median(row["seconds"]) for row in of_series], [row["own"] / 1e9 for row in of_series])
            for ax, cost, unit in zip(axes[:, column], costs, ("seconds a step", "GB above the imports"), strict=True):
                ax.plot(values, cost, marker="o", color="#2A6F97")
                ax.plot(values, [cost[-1] * value / values[-1] for value in values], "--", color="#8A8A8A", linewidth=1)
                ax.set_xscale("log", base=2)
                ax.set_yscale("log", base=2)
                ax.set_xticks(values, [str(value) for value in values])
                ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
                ax.set_ylabel(unit)
            axes[0, column].set_title(SERIES[series])
            axes[1, column].set_xlabel(SERIES[series])
        made.suptitle("A GRPO step; dashed: in proportion to the value", x=0.01, ha="left", fontsize=11)
    return png(made)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        out = (args.out or scratch / "points").expanduser().resolve()
        out.mkdir(parents=True, exist_ok=True)
        source = source_of(args, scratch)
        rows = [measured(point, source, args, out) for point in points(args)]
    args.figure.parent.mkdir(parents=True, exist_ok=True)
    args.figure.write_bytes(figure(rows))
    print("\n".join(table(rows)))
    print(f"\n{args.figure}")


if __name__ == "__main__":
    main()
