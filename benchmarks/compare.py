"""Tutelage beside what a user would pick instead: time and memory of each kind of work, both sides taking turns.

    python benchmarks/compare.py --model SMOLLM2 --reward-model MINILM --hh HH.jsonl.gz --gsm8k GSM8K.jsonl.gz --out DIR
    python benchmarks/compare.py --only grpo,generation ...      these rows
    python benchmarks/compare.py --quick                         a tiny random model and made texts: does it run?

Each side is a process that loads, runs once uncounted and waits; then runs alternate, Tutelage first, one side at a
time.  A finished row is a file in --out and is not run again.  README.md says what each row does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from peers.table import rows_of_table, settings_lines  # noqa: E402
from peers.works import SHARES, WORKS, Work  # noqa: E402

QUICK_PATIENCE = 300.0
FIX = "give --model, --reward-model, --hh and --gsm8k, or --quick"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face folder of the policy, such as SmolLM2-135M-Instruct")
    add("--reward-model", type=Path, help="folder of a BERT-like encoder, such as MiniLM: the reward of PPO")
    add("--hh", type=Path, help="rows of hh-rlhf (jsonl or jsonl.gz)")
    add("--gsm8k", type=Path, help="rows of GSM8K (jsonl or jsonl.gz)")
    add("--only", type=lambda text: text.split(","), help=f"of {', '.join([w.name for w in WORKS] + [SHARES])}")
    add("--repeat", type=int, default=None, help="rounds after the first, which is not counted (default: 5)")
    add("--threads", type=int, default=2, help="of each side; only one computes at a time (default: 2)")
    add("--clock", choices=("elapsed", "processor"), default="elapsed", help="which seconds the table shows")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--seed", type=int, default=0)
    add("--rows", type=int, help="demonstrations or pairs of a pass of sft, reward_model and dpo")
    add("--batch", type=int, help="of these, in one update")
    add("--micro", type=int, help="rows that a peer runs at once (pairs: half of them are chosen answers)")
    add("--prompts", type=int, help="of the generation rows")
    add("--lengths", type=int, nargs=2, metavar=("SHORTEST", "LONGEST"), help="of their responses")
    add("--grpo", type=int, nargs=3, metavar=("PROMPTS", "SAMPLES", "TOKENS"))
    add("--ppo", type=int, nargs=4, metavar=("PROMPTS", "TOKENS", "EPOCHS", "MINIBATCHES"))
    add("--longest", type=int, nargs=3, metavar=("PROMPT", "RESPONSE", "ROLLOUT_PROMPT"), help="longer rows are left")
    add("--sft-layout", choices=("padded", "padding_free"), default="padded", help="of TRL's SFTTrainer")
    add("--out", type=Path, help="folder of finished rows, which are not run again; default: a temporary one")
    add("--json", type=Path, help="write all rows to this file")
    add("--patience", type=float, default=3600.0, help="seconds until a side that says nothing is given up")
    add("--quick", action="store_true", help="a tiny random model, tiny sizes, one round")
    return parser.parse_args(argv)


def chosen(only: Sequence[str] | None) -> list[str]:
    """Names of the rows, in the order of the table; `generation` means both of its rows."""
    names = [*(work.name for work in WORKS), SHARES]
    if only is None:
        return names
    for wanted in only:
        if not any(fits(name, wanted) for name in names):
            raise SystemExit(f"error: {wanted} is no row\n  fix: --only with names of {', '.join(names)}")
    return [name for name in names if any(fits(name, wanted) for wanted in only)]


def fits(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}_")


def source_of(args: argparse.Namespace, scratch: Path) -> Any:
    """An `inputs.Source`; imports torch and Tutelage."""
    from peers.inputs import Sizes, Source

    sizes = Sizes.quick() if args.quick else Sizes()
    given = {name: getattr(args, name) for name in ("rows", "batch", "micro", "prompts")}
    lists = {name: getattr(args, name) for name in ("lengths", "grpo", "ppo", "longest")}
    given |= {name: None if value is None else tuple(value) for name, value in lists.items()}
    sizes = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    if sizes.rows % sizes.batch or sizes.batch % min(sizes.micro, sizes.batch):
        raise SystemExit("error: --rows must be a multiple of --batch, and --batch of --micro")
    if sizes.prompts < 2 or not 1 <= sizes.lengths[0] <= sizes.lengths[1]:
        raise SystemExit("error: generation needs 2 prompts or more, and --lengths in order")
    if args.quick:
        from workload import build_tiny_folder

        model = build_tiny_folder(scratch / "tiny", hidden=64, layers=2)
        return Source(model, None, None, None, scratch, args.dtype, args.threads, args.seed, sizes)
    paths = {name: getattr(args, name) for name in ("model", "reward_model", "hh", "gsm8k")}
    for name, path in paths.items():
        if path is None or not path.expanduser().exists():
            raise SystemExit(f"error: --{name.replace('_', '-')} is {path}, which is not there\n  fix: {FIX}")
    full = {name: path.expanduser().resolve() for name, path in paths.items()}
    return Source(
        full["model"],
        full["reward_model"],
        full["hh"],
        full["gsm8k"],
        scratch,
        args.dtype,
        args.threads,
        args.seed,
        sizes,
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    args.repeat = args.repeat or (1 if args.quick else 5)
    names = chosen(args.only)
    with tempfile.TemporaryDirectory() as temporary:
        out = (args.out or Path(temporary) / "rows").expanduser().resolve()
        out.mkdir(parents=True, exist_ok=True)
        scratch = Path(temporary) / "scratch"
        scratch.mkdir()
        source = source_of(args, scratch)
        asked = asked_of(args, source)
        found = [one_row(name, source, args, asked, out) for name in names]
        if args.json:
            args.json.write_text(json.dumps(found, indent=1), encoding="utf8")
    print("\n".join([*rows_of_table(found, args.clock), "", *settings_lines(found)]))
    if any("error" in row for row in found):
        raise SystemExit(1)


def asked_of(args: argparse.Namespace, source: Any) -> dict[str, Any]:
    """What a finished row must have been run with to stand for this one."""
    return json.loads(
        json.dumps(
            {
                "model": "tiny" if args.quick else source.model.name,
                "sizes": asdict(source.sizes),
                "repeat": args.repeat,
                "threads": args.threads,
                "dtype": args.dtype,
                "seed": args.seed,
                "sft_layout": args.sft_layout,
            }
        )
    )


def one_row(name: str, source: Any, args: argparse.Namespace, asked: dict[str, Any], out: Path) -> dict[str, Any]:
    """A row: of the folder, or run here and written there.  A side that fails makes a row that says so."""
    from peers.worker import WorkerError

    file = out / f"{name}.json"
    asked = {**asked, "clock": args.clock} if name == SHARES else asked
    if file.is_file():
        row: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        if row["asked"] == asked:
            print(f"{name}: finished before, read from {file}", file=sys.stderr)
            return row
        print(f"{name}: {file} was run with other settings and is run again", file=sys.stderr)
    work = next((work for work in WORKS if work.name == name), None)
    before = os.getloadavg()
    try:
        row = shares(source, args) if work is None else compared(work, source, args, out)
    except (WorkerError, CalledProcessError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return {"name": name, "asked": asked, "error": str(error)}
    row = {**row, "name": name, "asked": asked, "machine": machine(), "load": [before, os.getloadavg()]}
    if "skipped" not in row:
        file.write_text(json.dumps(row, indent=1), encoding="utf8")
    return row


def compared(work: Work, source: Any, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Both sides loaded and warm, then `repeat` rounds of one run each, in turn."""
    from peers.inputs import SPECIFICATIONS
    from peers.worker import Worker

    reason = work.missing()
    if reason:
        print(f"{work.name}: left out, {reason}", file=sys.stderr)
        return {"skipped": reason}
    print(f"{work.name}: against {work.peer}", file=sys.stderr)
    spec = SPECIFICATIONS[work.specification](source)
    spec = {**spec, **dict(work.extra), "layout": args.sft_layout, "eager": args.quick}
    file = source.scratch / f"{work.name}.json"
    file.write_text(json.dumps(spec), encoding="utf8")
    commands = {
        "tutelage": [sys.executable, str(HERE / "peers" / "tutelage_side.py"), str(file)],
        "peer": [str(work.python), str(HERE / "peers" / work.script), str(file)],
    }
    patience = QUICK_PATIENCE if args.quick else args.patience
    threads = {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    workers: dict[str, Worker] = {}
    ready: dict[str, Any] = {}
    rounds: list[dict[str, Any]] = []
    try:
        for side, command in commands.items():  # one loads and warms up at a time
            workers[side] = Worker(side, command, out / f"{work.name}.{side}.log", patience, threads)
            ready[side] = workers[side].reply()
            print(f"  {side} is ready", file=sys.stderr)
        for number in range(args.repeat):
            rounds.append({side: worker.ask("run") for side, worker in workers.items()})
            took = ", ".join(f"{side} {found['seconds']:.2f} s" for side, found in rounds[-1].items())
            print(f"  round {number + 1}: {took}", file=sys.stderr)
        memory = {side: worker.ask("end") for side, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    return {"work": asdict(work), "ready": ready, "rounds": rounds, "memory": memory}


def shares(source: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Training, prefill and decode at batch 64, as shares of the multiply rate measured between them."""
    from peers.shares import measured

    print(f"{SHARES}: against the multiply rate", file=sys.stderr)
    return {"shares": measured(source, args.repeat, args.clock, quick=args.quick)}


def machine() -> dict[str, Any]:
    """Processor, cores, memory in GiB, whether it has bf16 instructions, and how idle threads of OpenMP wait."""
    about: dict[str, Any] = {"cores": os.cpu_count(), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "unset")}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf8")
        fields = [line.partition(":") for line in text.splitlines()]
        about["processor"] = next((value.strip() for key, _, value in fields if key.strip() == "model name"), "unknown")
        flags = next((value.split() for key, _, value in fields if key.strip() in ("flags", "Features")), [])
        about["bf16 instructions"] = any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))
    except OSError:
        about["processor"] = "unknown"
    about["memory GiB"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    return about


if __name__ == "__main__":
    main()
