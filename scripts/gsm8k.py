#!/usr/bin/env python3
"""GSM8K with GRPO: write the prompts, run the recipe, print what it came to.

    scripts/gsm8k.py data [--source FOLDER] [--examples N]   runs/gsm8k/data/{train,test}.jsonl
    scripts/gsm8k.py run [--model PATH] [a.b=c ...]          the recipe gsm8k_grpo, then the tables
    scripts/gsm8k.py tables RUN                              the tables of a run, for docs/results

FOLDER holds train.jsonl.gz and test.jsonl.gz with question and answer; without one they come from the hub
(openai/gsm8k).  Worked examples (none by default), the first rows of the training file, stand before every question as
turns of a chat, without their calculator marks (<<48/2=24>>); they are left out of training.  The truth stays the whole
solution: the rule `math_answer` reads the number after its ####.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tutelage.build import run_recipe
from tutelage.config import load_checked
from tutelage.data.sources import read_rows
from tutelage.reports.metrics_log import read_jsonl, read_metrics

FOLDER = Path("runs/gsm8k/data")
HUB = "openai/gsm8k/main"
ASK = "Solve the problem step by step. Write the final answer as a number after #### on the last line."
CALCULATOR = re.compile(r"<<[^<>]*>>")
COLUMNS = ("base", "trained", "change")


def worked(row: dict[str, Any]) -> list[dict[str, str]]:
    """An example as two turns."""
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": CALCULATOR.sub("", row["answer"])},
    ]


def prompt(question: str, examples: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """What the policy reads: how to answer, the examples, the question."""
    turns = [turn for row in examples for turn in worked(row)]
    return [{"role": "system", "content": ASK}, *turns, {"role": "user", "content": question}]


def write_prompts(source: Path | None, folder: Path, worked_examples: int) -> dict[str, int]:
    """Prompts and truths of both parts; how many of each."""
    files = {
        part: f"{HUB}:{part}" if source is None else str(source / f"{part}.jsonl.gz") for part in ("train", "test")
    }
    rows = {part: read_rows(name).rows for part, name in files.items()}
    examples, rows["train"] = rows["train"][:worked_examples], rows["train"][worked_examples:]
    folder.mkdir(parents=True, exist_ok=True)
    for part, kept in rows.items():
        lines = [{"prompt": prompt(row["question"], examples), "truth": row["answer"]} for row in kept]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf8")
    return {part: len(kept) for part, kept in rows.items()}


def shown(value: dict[str, float] | None, *, share: bool, sign: bool = False) -> str:
    """`3.1 % [1.2, 7.8]`, or the plain number."""
    if value is None:
        return "–"
    scale, unit, digits = (100, " %", 1) if share else (1, "", 3)
    mean, *ends = (f"{value[k] * scale:{'+' if sign else ''}.{digits}f}" for k in ("mean", "low", "high") if k in value)
    return f"{mean}{unit} [{', '.join(ends)}]" if ends else f"{mean}{unit}"


def tables(run: Path) -> str:
    """Before and after under the same prompts, and the reward along the way, as Markdown."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf8"))
    before, after = summary["before"], summary["after"]
    lines = [f"| {after['prompts']} held-out problems, the same before and after | {' | '.join(COLUMNS)} |"]
    lines.append("|---|---|---|---|")
    names = {"rule/strict": "right, strict (`#### N`)", "rule/lenient": "right, lenient (last number)"}
    for name, label in names.items():
        change = shown(after.get(f"{name}_change"), share=True, sign=True)
        lines.append(f"| {label} | {shown(before[name], share=True)} | {shown(after[name], share=True)} | {change} |")
    change = shown(after.get("proxy_change"), share=False, sign=True)
    lines.append(
        f"| reward | {shown(before['proxy'], share=False)} | {shown(after['proxy'], share=False)} | {change} |"
    )
    for key, label in (("eval/length_mean", "length, tokens"), ("eval/truncated_fraction", "cut by the limit")):
        lines.append(f"| {label} | {before[key]:.2f} | {after[key]:.2f} | |")
    passes = sorted(key for key in after if key.startswith("eval/pass_at_"))
    for key in passes:
        lines.append(f"| {key.removeprefix('eval/')} | {before[key]:.3f} | {after[key]:.3f} | |")
    steps = [row for row in read_metrics(run) if "reward/score_mean" in row]
    lines += [
        "",
        "| steps | reward | right, strict | form | length | equal groups | s a step |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [curve_row(steps[start : start + width(steps)]) for start in range(0, len(steps), width(steps))]
    errors = len(read_jsonl(run / "samples" / "errors.jsonl"))
    lines += [
        "",
        f"{summary['steps']} steps, {summary['seconds']:.0f} s of wall time, {errors} responses without a score.",
    ]
    return "\n".join(lines)


def width(steps: Sequence[Any]) -> int:
    """Steps of one row of the curve: ten rows."""
    return max(1, -(-len(steps) // 10))


def curve_row(part: Sequence[dict[str, float]]) -> str:
    def mean(name: str) -> float:
        values = [row[name] for row in part if name in row]
        return sum(values) / len(values) if values else float("nan")

    first, last = int(part[0]["step"]), int(part[-1]["step"])
    return (
        f"| {first}–{last} | {mean('reward/score_mean'):.3f} | {mean('reward/source/math_answer'):.3f} | "
        f"{mean('reward/source/regex'):.3f} | {mean('rollout/length_mean'):.0f} | "
        f"{mean('reward/group_equal_fraction'):.2f} | {mean('time/step_s'):.0f} |"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data")
    data.add_argument("--source", type=Path)
    data.add_argument("--examples", type=int, default=0)
    run = commands.add_parser("run")
    run.add_argument("--model")
    run.add_argument("overrides", nargs="*")
    commands.add_parser("tables").add_argument("run", type=Path)
    asked = parser.parse_args(arguments)
    if asked.command == "data":
        print(write_prompts(asked.source, FOLDER, asked.examples))
    elif asked.command == "tables":
        print(tables(asked.run))
    else:
        model = [f"model.path={asked.model}"] if asked.model else []
        loaded, warnings = load_checked("gsm8k_grpo", [*model, *asked.overrides])
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(tables(run_recipe(loaded, "plain").folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
