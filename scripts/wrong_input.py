"""Give the commands wrong input, one case after the other, and show what they say.

    python scripts/wrong_input.py [--only TEXT] [--markdown]

Everything is made offline in a temporary folder: a tiny model, small data files, three recipes. Every case is a real
command line. Most run in this process; those that are killed run in one of their own. The full disk is a small tmpfs
where this user may mount one; elsewhere the writes of a checkpoint raise ENOSPC, and the output says which it was.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from wrong_files import (
    CONTEXT,
    build_workspace,
    empty_rows,
    equal_pairs,
    long_rows,
    misspelt_column,
    mixed_rows,
    pickled_weights,
    unknown_key_recipe,
    write_model,
)

from tutelage.cli.app import app
from tutelage.reports.metrics_log import read_metrics

COMMAND = (sys.executable, "-c", "from tutelage.cli import main; main()")
WAIT_S = 300
WRITTEN_FIRST = ("config.yaml", "lineage.json", "preflight.json", "metrics.jsonl", "events.jsonl")
"""Files of a run folder that are there before its checkpoints."""


@dataclass(frozen=True)
class Case:
    """title: what is wrong; args: the command line after `tutelage`; before: makes the wrong thing in the workspace."""

    name: str
    title: str
    args: tuple[str, ...]
    before: Callable[[Path], object] | None = None


@dataclass
class Outcome:
    """What one command did.  message: stderr, then stdout where the command succeeded; left: run folders it made."""

    args: tuple[str, ...]
    exit_code: int
    seconds: float
    message: str
    left: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)


def nan_models(root: Path) -> None:
    """A reward model trained for one step: one copy whose head is NaN, one whose transformer is."""
    outcome = call(root, ("run", "reward_model.yaml", "name=tiny", "max_steps=1"))
    assert outcome.exit_code == 0, outcome.message
    for name, part in (("nan_head", "score.weight"), ("nan_weights", "norm.weight")):
        folder = root / "models" / name
        shutil.copytree(root / "runs" / "tiny" / "checkpoints" / "best" / "model", folder)
        tensors = load_file(folder / "model.safetensors")
        broken = {k: torch.full_like(t, torch.nan) if k.endswith(part) else t for k, t in tensors.items()}
        save_file(broken, folder / "model.safetensors", {"format": "pt"})
    shutil.rmtree(root / "runs" / "tiny")


def with_rule(name: str) -> str:
    return f'reward.rules=[{{function: "rules.py:{name}"}}]'


CASES = (
    Case("misspelt_recipe", "A misspelt recipe name", ("run", "hh_pppo")),
    Case("unknown_key", "An unknown key", ("run", "unknown_key.yaml"), unknown_key_recipe),
    Case("wrong_type", "A value of the wrong type", ("run", "sft.yaml", "optim.lr=fast")),
    Case("out_of_range", "A value out of range", ("run", "ppo.yaml", "rollout.temperature=0")),
    Case("no_effect", "A key without effect in this run", ("run", "ppo.yaml", "kl.target=3")),
    Case("vf_coef_0", "A critic that would not learn", ("run", "ppo.yaml", "ppo.vf_coef=0")),
    Case("k1_in_the_loss", "k1 as a loss", ("run", "ppo.yaml", "kl.placement=loss", "kl.estimator=k1")),
    Case("top_p", "Truncated sampling in training rollouts", ("run", "ppo.yaml", "rollout.top_p=0.9")),
    Case("kl_0", "A KL coefficient of 0 (allowed, warns)", ("check", "ppo.yaml", "kl.coef=0")),
    Case("missing_file", "A data file that does not exist", ("run", "sft.yaml", "data.train=data/demonstration.jsonl")),
    Case(
        "missing_column",
        "A missing column",
        ("run", "reward_model.yaml", "data.train=data/misspelt.jsonl"),
        misspelt_column,
    ),
    Case("mixed_formats", "Mixed formats in one file", ("run", "sft.yaml", "data.train=data/mixed.jsonl"), mixed_rows),
    Case(
        "empty_responses",
        "Empty responses, more than data.max_bad_fraction",
        ("run", "sft.yaml", "data.train=data/empty.jsonl"),
        lambda root: empty_rows(root, "empty", 4),
    ),
    Case(
        "one_empty_response",
        "One empty response (dropped and counted)",
        ("check", "sft.yaml", "data.train=data/one_empty.jsonl"),
        lambda root: empty_rows(root, "one_empty", 20),
    ),
    Case(
        "long_prompts",
        "Prompts longer than the context",
        ("run", "ppo.yaml", "data.train=data/long.jsonl"),
        lambda root: long_rows(root, "long", 4),
    ),
    Case(
        "one_long_prompt",
        "One prompt longer than the context, data.too_long=error",
        ("run", "ppo.yaml", "data.train=data/one_long.jsonl", "data.too_long=error"),
        lambda root: long_rows(root, "one_long", 20),
    ),
    Case("no_room", "Responses that fill the whole context", ("run", "ppo.yaml", f"rollout.max_new_tokens={CONTEXT}")),
    Case(
        "identical_pairs",
        "Chosen equal to rejected",
        ("run", "reward_model.yaml", "data.train=data/equal.jsonl"),
        equal_pairs,
    ),
    Case("no_model", "A model folder that does not exist", ("run", "sft.yaml", "model.path=models/polcy")),
    Case(
        "no_eos",
        "A tokenizer without EOS",
        ("run", "sft.yaml", "model.path=models/no_eos"),
        lambda root: write_model(root / "models" / "no_eos", eos=None),
    ),
    Case(
        "no_pad",
        "A tokenizer without pad (works: nothing is ever padded with it)",
        ("run", "ppo.yaml", "name=no_pad", "model.path=models/no_pad", "max_steps=1"),
        lambda root: write_model(root / "models" / "no_pad", pad=None),
    ),
    Case(
        "pickled",
        "Pickled weights that run code when they are opened",
        ("run", "sft.yaml", "model.path=models/pickled"),
        pickled_weights,
    ),
    Case("no_reward_model", "A reward model that does not exist", ("run", "ppo.yaml", "reward.model=models/rewrd")),
    Case("plain_model", "A plain language model as reward model", ("run", "ppo.yaml", "reward.model=models/policy")),
    Case("no_rule", "A reward function that does not exist", ("run", "ppo.yaml", with_rule("shrt"))),
    Case(
        "nan_reward",
        "A reward function that returns NaN in step 2",
        ("run", "ppo.yaml", "name=nan", with_rule("nan_in_step_2")),
    ),
    Case(
        "nan_reward_model",
        "A reward model whose scores are NaN",
        ("run", "ppo.yaml", "name=nan_head", "reward.rules=[]", "reward.model=models/nan_head"),
        nan_models,
    ),
    Case(
        "nan_weights",
        "A model with weights that are NaN",
        ("run", "ppo.yaml", "name=nan_weights", "reward.rules=[]", "reward.model=models/nan_weights"),
    ),
    Case(
        "wrong_number",
        "A reward function that returns the wrong number of scores",
        ("run", "ppo.yaml", "name=wrong_number", with_rule("one_too_few")),
    ),
    Case(
        "rule_raises",
        "A reward function that raises",
        ("run", "ppo.yaml", "name=raises", with_rule("divides_by_zero")),
    ),
    Case(
        "not_a_run",
        "Resuming what is not a run",
        ("resume", "runs/min"),
        lambda root: call(root, ("run", "sft.yaml", "name=mine", "max_steps=1")),
    ),
)


def call(root: Path, args: tuple[str, ...]) -> Outcome:
    """One command in this process, with the workspace as working folder."""
    folders, started = run_folders(root), time.perf_counter()
    with contextlib.chdir(root):
        result = CliRunner().invoke(app, list(args))
    seconds = time.perf_counter() - started
    message = result.stderr + (result.stdout if result.exit_code == 0 else "")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        message += f"Traceback: {result.exception!r}"
    return outcome_of(root, args, result.exit_code, seconds, message, folders)


def outcome_of(
    root: Path, args: tuple[str, ...], exit_code: int, seconds: float, message: str, before: set[str]
) -> Outcome:
    text = message.replace(f"{root.resolve()}/", "").replace(f"{root}/", "").strip()
    return Outcome(args, exit_code, seconds, text, sorted(run_folders(root) - before))


def run_folders(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for base in ("runs", "disk") for path in root.glob(f"{base}/*")}


def run_case(root: Path, case: Case) -> Outcome:
    if case.before is not None:
        case.before(root)
    outcome = call(root, case.args)
    if case.name == "pickled":
        outcome.facts.append(f"its code ran: {'yes' if (root / 'unpickled').exists() else 'no'}")
    for left in outcome.left:
        outcome.facts.append(left_behind(root / left))
    return outcome


def one_case(case: Case, root: Path) -> list[Outcome]:
    return [run_case(root, case)]


def left_behind(folder: Path) -> str:
    """The steps and samples of a run folder, in words."""
    steps = [record["step"] for record in read_metrics(folder) if "time/step_s" in record]
    samples = sorted(path.stem for path in (folder / "samples").glob("*.jsonl"))
    return f"metrics of the steps {steps or 'none'}, samples: {', '.join(samples) or 'none'}"


def killed_run(root: Path) -> list[Outcome]:
    """`kill -9` in the middle of step 3 with checkpoint.every=1, then resume; then resume with changed data."""
    args = ("run", "ppo.yaml", "name=killed", "checkpoint.every=1", with_rule("stalls_in_step_3"))
    folders, started = run_folders(root), time.perf_counter()
    process = subprocess.Popen([*COMMAND, *args], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not (root / "stalled").exists() and process.poll() is None and time.perf_counter() - started < WAIT_S:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    seconds = time.perf_counter() - started
    killed = outcome_of(root, args, process.returncode, seconds, "(kill -9 in the middle of step 3)", folders)
    folder = root / "runs" / "killed"
    killed.facts += [left_behind(folder), f"checkpoints: {', '.join(checkpoints(folder))}"]
    data = root / "data" / "prompts.jsonl"
    original = data.read_text()
    data.write_text(original + '{"prompt": "what is new"}\n')
    refused = call(root, ("resume", "runs/killed"))
    data.write_text(original)
    resumed = call(root, ("resume", "runs/killed"))
    resumed.message = "\n".join(resumed.message.splitlines()[-2:])
    resumed.facts.append(left_behind(folder))
    return [killed, refused, resumed]


def damaged_checkpoint(root: Path) -> list[Outcome]:
    """The last checkpoint of a run that did not come to its summary is cut short; then it is deleted, as told."""
    made = call(root, ("run", "sft.yaml", "name=damaged", "checkpoint.every=1"))
    assert made.exit_code == 0, made.message
    folder = root / "runs" / "damaged"
    (folder / "summary.json").unlink()
    last = folder / "checkpoints" / checkpoints(folder)[-1]
    file = last / "actor" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    refused = call(root, ("resume", "runs/damaged"))
    shutil.rmtree(last)
    resumed = call(root, ("resume", "runs/damaged"))
    resumed.message = "\n".join(resumed.message.splitlines()[-2:])
    return [refused, resumed]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


def full_disk(root: Path, room: float) -> list[Outcome]:
    """A run whose third checkpoint no longer fits: the disk holds two and `room` of the third's tensors. It grows then.

    Space for the tensors is asked for before writing: with less room the checkpoint is refused before a byte is
    written; with a little more it fails half-way, for there are headers, a tokenizer and whole pages besides.
    """
    measured = call(root, ("run", "sft.yaml", "name=measured", "checkpoint.every=1", "checkpoint.keep=9"))
    assert measured.exit_code == 0, measured.message
    made = root / "runs" / "measured"
    before = [path for path in made.iterdir() if path.name in WRITTEN_FIRST]
    two = [made / "checkpoints" / step for step in checkpoints(made)[:2]]
    held = sum(used(path) for path in (*before, *two))
    shards = (load_file(path) for path in two[1].rglob("*.safetensors"))
    tensors = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    shutil.rmtree(made)
    args = ("run", "sft.yaml", "output_dir=disk", "name=full", "checkpoint.every=1", "checkpoint.keep=9")
    folder = root / "disk" / "full"
    with small_disk(root / "disk", held + int(room * tensors)) as grow:
        failed = call(root, args)
        failed.facts += [
            f"the disk: {grow.kind}",
            left_behind(folder),
            f"checkpoints: {', '.join(checkpoints(folder))}",
        ]
        failed.facts += [f"left of the failed one: {', '.join(hidden(folder)) or 'nothing'}"]
        grow()
        resumed = call(root, ("resume", "disk/full"))
        resumed.message = "\n".join(resumed.message.splitlines()[-2:])
        resumed.facts += [left_behind(folder), f"checkpoints: {', '.join(checkpoints(folder))}"]
    return [failed, resumed]


def hidden(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(".*"))


def used(path: Path) -> int:
    """Bytes of a file or a folder on a disk with pages of 4 KiB."""
    files = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in files)


@dataclass
class Growing:
    """Called, it makes room.  kind: a real file system, or a simulation."""

    kind: str
    grow: Callable[[], object]

    def __call__(self) -> None:
        self.grow()


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Growing]:
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size // 1024}k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode != 0:
        with simulated_disk() as grow:
            yield grow
        shutil.rmtree(folder)
        return
    try:
        remount = ["mount", "-o", "remount,size=64m", str(folder)]
        yield Growing(f"a tmpfs of {size // 1024} KiB", lambda: subprocess.run(remount, check=True))
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


@contextlib.contextmanager
def simulated_disk() -> Iterator[Growing]:
    """The trainer state of the third checkpoint raises ENOSPC, until room is made."""
    from tutelage.engines import saved as module

    write, full = module.save_file, [True]

    def limited(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if full and "step_000003" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(tensors, path)

    with mock.patch.object(module, "save_file", limited):
        yield Growing("simulated (no right to mount): writing the third checkpoint raises ENOSPC", full.clear)


SEQUENCES: dict[str, tuple[str, Callable[[Path], list[Outcome]]]] = {
    "full_disk": ("A full disk at checkpoint time", lambda root: full_disk(root, 0.3)),
    "full_disk_half_way": ("A disk that fills while a checkpoint is written", lambda root: full_disk(root, 1.06)),
    "killed": ("An interrupted run (kill -9), changed data, and going on", killed_run),
    "damaged": ("A damaged checkpoint", damaged_checkpoint),
}


def as_text(title: str, outcomes: list[Outcome], markdown: bool) -> str:
    lines = [f"### {title}" if markdown else f"== {title}", ""]
    for outcome in outcomes:
        told = [f"$ tutelage {shlex.join(outcome.args)}", *outcome.message.splitlines()]
        lines += ["```text", *told, "```"] if markdown else told
        left = ", ".join(outcome.left) or "none"
        facts = [f"exit {outcome.exit_code}", f"{outcome.seconds:.1f} s", f"run folder made: {left}", *outcome.facts]
        lines += ["", "; ".join(facts) + ".", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = build_workspace(Path(folder).resolve())
        jobs: list[tuple[str, str, Callable[[Path], list[Outcome]]]]
        jobs = [(case.name, case.title, partial(one_case, case)) for case in CASES]
        jobs += [(name, title, sequence) for name, (title, sequence) in SEQUENCES.items()]
        for name, title, job in jobs:
            if options.only not in name:
                continue
            outcomes = job(root)
            failed += any(re.search(r"^Traceback", outcome.message, re.MULTILINE) for outcome in outcomes)
            print(as_text(title, outcomes, options.markdown), flush=True)
    print(f"{failed} cases ended in a traceback", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())
