"""How fast each stage is, how much memory it takes, and which share of the machine's matrix multiply rate it reaches.

    python benchmarks/stages.py                       a tiny model, built offline
    python benchmarks/stages.py --model FOLDER        a Hugging Face folder, such as SmolLM2-135M-Instruct
    python benchmarks/stages.py --stage sft --stage decode --repeat 9 --markdown

The denominator of every share is the rate of a large square product in the same precision, measured between the
stages, so both see the same machine. README.md beside this file says what each row runs and how FLOPs are counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from counting import padding_share, predicted_padding_ratio
from measure import SQUARE, Memory, Multiply, Timing, interleaved, model_products, stage_memory
from transformers.utils.logging import disable_progress_bar
from workload import STAGES, Sizes, Stage, Workload, build_tiny_folder

from tutelage.build.device import device
from tutelage.errors import TutelageError

MATMUL = "matmul"
HEADINGS = (
    "stage", "median s", "min - max s", "cores", "tokens", "tokens/s", "GFLOP", "GFLOP/s", "share", "peak MB", "own MB",
)  # fmt: skip


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or a Hugging Face model folder (default: tiny)")
    parser.add_argument(
        "--stage",
        action="append",
        choices=[MATMUL, *STAGES],
        metavar="NAME",
        help=f"may be given several times; default: all of {', '.join([MATMUL, *STAGES])}",
    )
    parser.add_argument("--repeat", type=positive, default=5, help="rounds after the first, which is not counted")
    parser.add_argument("--threads", type=positive, help="torch threads; default: torch's own choice")
    parser.add_argument("--sequences", type=at_least_two, default=Sizes.sequences, help="sequences of every stage")
    parser.add_argument("--new-tokens", type=at_least_two, default=Sizes.new_tokens, help="of every sampled response")
    parser.add_argument(
        "--ragged-sequences",
        type=at_least_two,
        default=Sizes.ragged_sequences,
        help="sequences of sft_packed and sft_padded",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute precision")
    parser.add_argument(
        "--clock",
        choices=("elapsed", "processor"),
        default="elapsed",
        help="processor: seconds that this process computed, for a machine shared with other work; one CPU thread only",
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths and token ids")
    parser.add_argument("--no-memory", action="store_true", help="do not run each stage again in a process of its own")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    return _whole_number(text, 1)


def at_least_two(text: str) -> int:
    return _whole_number(text, 2)


def _whole_number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    disable_progress_bar()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.clock == "processor" and (torch.get_num_threads() > 1 or device() == "cuda"):
        raise SystemExit(
            "error: several threads, and a GPU, make processor time say little\n  fix: --threads 1, no GPU"
        )
    sizes = Sizes(
        sequences=args.sequences,
        new_tokens=args.new_tokens,
        ragged_sequences=args.ragged_sequences,
        seed=args.seed,
    )
    with tempfile.TemporaryDirectory() as scratch:
        tiny = args.model == "tiny"
        folder = build_tiny_folder(Path(scratch) / "tiny") if tiny else Path(args.model).expanduser().resolve()
        try:
            print("\n".join(report(folder, sizes, args)))
        except TutelageError as error:
            raise SystemExit(f"error: {error}") from None


def report(folder: Path, sizes: Sizes, args: argparse.Namespace) -> list[str]:
    """All lines of the output, after all measurements."""
    chosen = args.stage or [MATMUL, *STAGES]
    names = [name for name in STAGES if name in chosen]
    workload, memory = Workload(folder, sizes, args.dtype), {}
    header = about(folder, workload, args)
    if not args.no_memory:
        memory = {name: stage_memory(name, folder, sizes, args.dtype, torch.get_num_threads()) for name in names}
    stages = [STAGES[name](workload) for name in names]
    square = Multiply(SQUARE, SQUARE, SQUARE, args.dtype)
    timings, rates = interleaved(stages, square, args.repeat, args.clock)
    rates = rates or [square.rate(args.clock) for _ in range(args.repeat)]
    rate = statistics.median(rates)
    lines = [header, f"multiply rate: {rate_line(rates)} ({square.name})", ""]
    if MATMUL in chosen:
        lines += table(("product", "GFLOP/s", "share"), product_rows(workload, rate, args), args.markdown)
    if stages:
        rows = [stage_row(stage, timings[stage.name], rate, memory.get(stage.name)) for stage in stages]
        lines += table(HEADINGS, rows, args.markdown)
    if {"sft_packed", "sft_padded"} <= set(names):
        lines += packing_lines(workload, timings)
    if workload.largest_logits[0]:
        lines += [logits_line(workload, stages)]
    return lines


def about(folder: Path, workload: Workload, args: argparse.Namespace) -> str:
    weights, sizes = workload.weights, workload.sizes
    name = "tiny" if args.model == "tiny" else folder.name
    where = torch.cuda.get_device_name() if device() == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return (
        f"{name}: {weights.trunk / 1e6:.3g} M weights in the trunk, {weights.head / 1e6:.2g} M in the output layer; "
        f"{args.dtype}; {where}; {sizes.sequences} sequences, {sizes.new_tokens} tokens sampled of each; "
        f"{args.repeat} rounds, {args.clock} time"
    )


def rate_line(rates: Sequence[float]) -> str:
    low, high = min(rates) / 1e9, max(rates) / 1e9
    return f"median {statistics.median(rates) / 1e9:.1f} GFLOP/s, {low:.1f} to {high:.1f} over {len(rates)} probes"


def product_rows(workload: Workload, rate: float, args: argparse.Namespace) -> list[list[str]]:
    products = [Multiply(m, k, n, args.dtype) for m, k, n in model_products(workload)]
    rounds = [[product.rate(args.clock) for product in products] for _ in range(args.repeat)]
    medians = [statistics.median(seen) for seen in zip(*rounds, strict=True)]
    return [
        [product.name, f"{seen / 1e9:.1f}", f"{seen / rate:.0%}"]
        for product, seen in zip(products, medians, strict=True)
    ]


def stage_row(stage: Stage, timing: Timing, rate: float, memory: Memory | None) -> list[str]:
    """See HEADINGS. own MB: the peak less the size after imports; on a GPU, what was allocated there instead."""
    flops = stage.flops / timing.median
    peak, own = "", ""
    if memory is not None:
        peak = f"{memory.peak / 1e6:.0f}"
        own = f"{(memory.device_peak or memory.peak - memory.imports) / 1e6:.0f}"
    return [
        stage.name,
        f"{timing.median:.3g}",
        f"{min(timing.seconds):.3g} - {max(timing.seconds):.3g}",
        f"{timing.cores:.1f}",
        f"{stage.tokens}",
        f"{stage.tokens / timing.median:.0f}",
        f"{stage.flops / 1e9:.1f}",
        f"{flops / 1e9:.1f}",
        f"{flops / rate:.0%}",
        peak,
        own,
    ]


def packing_lines(workload: Workload, timings: Mapping[str, Timing]) -> list[str]:
    """The prediction is made from lengths and weights alone; the measurement is of pairs in the same round."""
    sequences = workload.ragged_demonstrations().sequences
    lens, responses = sequences.tokens.lens.tolist(), int(sequences.response_lens.sum())
    packed, padded = timings["sft_packed"].seconds, timings["sft_padded"].seconds
    ratios = [slow / fast for slow, fast in zip(padded, packed, strict=True)]
    predicted = predicted_padding_ratio(workload.weights, lens, responses)
    return [
        f"padded against packed, {len(lens)} sequences of {min(lens)} to {max(lens)} tokens, "
        f"{padding_share(lens):.0%} padding: predicted {predicted:.2f} "
        f"times the time, measured {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
    ]


def logits_line(workload: Workload, stages: Sequence[Stage]) -> str:
    rows, vocabulary = workload.largest_logits
    width = 2 if workload.model_cfg.dtype == "bfloat16" else 4
    most = max(stage.positions for stage in stages)
    largest = f"largest logits tensor: {rows} x {vocabulary}, {rows * vocabulary * width / 1e6:.1f} MB"
    if not most:
        return largest
    return (
        f"{largest}; all positions of the largest batch at once would be {most} x {vocabulary}, "
        f"{most * vocabulary * width / 1e6:.1f} MB"
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> list[str]:
    """Lines, and an empty one after them. Columns without a single entry are left out."""
    kept = [c for c in range(len(headings)) if any(row[c] for row in rows)]
    cells = [[line[c] for c in kept] for line in (headings, *rows)]
    if markdown:
        cells.insert(1, ["---", *["---:"] * (len(kept) - 1)])
        return [*(f"| {' | '.join(line)} |" for line in cells), ""]
    widths = [max(len(line[c]) for line in cells) for c in range(len(kept))]
    return [
        *("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in cells),
        "",
    ]


if __name__ == "__main__":
    main()
