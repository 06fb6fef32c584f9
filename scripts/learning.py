#!/usr/bin/env python3
"""Does every algorithm learn?  Each on the bundled task, over several seeds: gold quality before and after.

    python scripts/learning.py [--seeds N] [--only NAME ...] [--out DIR] [--write docs/results/learning.md]

For each seed the corpus, the SFT policy and the reward model of the demo are made once; every algorithm starts from
them with the settings below (SFT's own variants start from the untrained model).  Gold is the task's own quality, which
no training sees.  Measured is the last policy, never the best one, on 128 held-out prompts with the same random keys
before and after.  The interval is Student's over the seeds' mean changes.  What is done is kept in DIR: the command
goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from tutelage.build import run_recipe
from tutelage.build.data import load_template, stage_data
from tutelage.config import load_checked
from tutelage.config.common import ModelConfig
from tutelage.demo.corpus import CorpusPaths, write_corpus
from tutelage.demo.gold import gold_score
from tutelage.demo.model import build_model_folder
from tutelage.engines.engine import ModelEngine
from tutelage.errors import TutelageError
from tutelage.evals.answers import first_prompts
from tutelage.math.stats import mean_interval
from tutelage.models.load import load_causal_lm
from tutelage.rewards.checks import prompt_text
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams

PROMPTS = 128
TOKENS = 24


@dataclass(frozen=True)
class Entry:
    """One row of the table: a shipped recipe and what is set besides."""

    family: str
    name: str
    recipe: str
    overrides: tuple[str, ...] = ()


SHORT = ("max_steps=12",)
PAIR_STEPS, SFT_STEPS = "max_steps=30", "max_steps=60"
ITERATED = (*SHORT, "rollout.prompts_per_step=16", "online_dpo.reference_every=4")


def grpo(name: str, *overrides: str) -> Entry:
    return Entry("advantage estimators", name, "demo_grpo", (*SHORT, "rollout.prompts_per_step=8", *overrides))


def policy(name: str, *overrides: str) -> Entry:
    settings = (*SHORT, "rollout.prompts_per_step=8", f"policy_loss.kind={name}", *overrides)
    return Entry("policy losses", name, "demo_grpo", settings)


def dpo(name: str, *overrides: str) -> Entry:
    return Entry("preference losses", name, "demo_dpo", (PAIR_STEPS, f"dpo.loss={name}", *overrides))


def unpaired(name: str, *overrides: str) -> Entry:
    return Entry("unpaired losses", name, "demo_kto", (PAIR_STEPS, f"kto.loss={name}", *overrides))


def distill(name: str, *overrides: str) -> Entry:
    """The teacher is the policy that PPO with a critic made of the same seed: that row comes first."""
    return Entry(
        "rejection sampling, distillation", name, "demo_distill", (*SHORT, "teacher.path={teacher}", *overrides)
    )


PAIRS = ("demo_dpo", "demo_kto")
PPO = Entry("policy losses", "ppo with a critic", "demo_ppo", (*SHORT, "rollout.prompts_per_step=64"))

ENTRIES: tuple[Entry, ...] = (
    PPO,
    grpo("grpo"),
    grpo("dr_grpo", "grpo.estimator=dr_grpo", "grpo.aggregation=constant_horizon"),
    grpo("rloo", "grpo.estimator=rloo"),
    grpo("reinforce_plus_plus", "grpo.estimator=reinforce_plus_plus"),
    grpo("reinforce_plus_plus_baseline", "grpo.estimator=reinforce_plus_plus_baseline"),
    grpo("remax", "grpo.estimator=remax"),
    grpo("opo", "grpo.estimator=opo"),
    grpo("gpg", "grpo.estimator=gpg"),
    grpo("grpo_passk", "grpo.estimator=grpo_passk"),
    grpo("optimal_token_baseline", "grpo.estimator=optimal_token_baseline"),
    grpo("gdpo", "grpo.estimator=gdpo"),
    *(policy(name) for name in ("gspo", "sapo", "cispo", "gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")),
    policy("reinforce", "grpo.epochs=1", "grpo.minibatches=1"),
    *(dpo(n) for n in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "ipo_sum", "discopop", "nca_pair", "bco_pair")),
    *(dpo(n) for n in ("sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired", "orpo", "cpo", "simpo", "alphapo")),
    dpo("robust", "dpo.label_smoothing=0.1"),
    dpo("exo_pair", "dpo.label_smoothing=0.001"),
    *(unpaired(name) for name in ("kto", "apo_zero_unpaired", "bco")),
    Entry("online preferences", "online_dpo", "demo_online_dpo", (*SHORT, "rollout.prompts_per_step=32")),
    Entry("online preferences", "iterative_dpo", "demo_iterative_dpo", ITERATED),
    Entry("online preferences", "xpo", "demo_xpo", (*SHORT, "rollout.prompts_per_step=32")),
    Entry("online preferences", "nash_md", "demo_nash_md", (*SHORT, "rollout.prompts_per_step=32")),
    Entry("rejection sampling, distillation", "raft", "demo_raft", (*SHORT, "rollout.prompts_per_step=8")),
    *(distill(name, f"distill.divergence={name}") for name in ("reverse_kl", "forward_kl", "jsd")),
    distill("reverse_kl, sampled", "distill.divergence=reverse_kl", "distill.form=sampled"),
    Entry("variants of policy optimisation", "dapo", "demo_dapo", (*SHORT, "rollout.prompts_per_step=8")),
    Entry("supervised", "nll", "demo_sft", (SFT_STEPS,)),
    Entry("supervised", "dft", "demo_sft", (SFT_STEPS, "sft.loss=dft")),
    Entry("supervised", "nll with NEFTune", "demo_sft", (SFT_STEPS, "sft.neftune_alpha=5")),
)


def prepare(folder: Path, seed: int) -> Base:
    """Corpus, SFT policy and reward model of a seed, made once."""
    done, untrained = folder / "prepared.json", folder / "model"
    corpus = write_corpus(folder / "data", seed)
    if not done.exists():
        build_model_folder(untrained, seed)
        common = (f"output_dir={folder}", f"seed={seed}")
        demonstrations = (f"model.path={untrained}", f"data.train={corpus.demonstrations}")
        sft = train("demo_sft", *common, "name=sft", *demonstrations)
        pairs = (f"data.train={corpus.preferences}", f"data.eval={corpus.eval_preferences}")
        reward = train("demo_reward_model", *common, "name=reward", f"model.path={sft.best_model}", *pairs)
        done.write_text(json.dumps({"policy": str(sft.best_model), "reward": str(reward.best_model)}))
    saved = json.loads(done.read_text())
    return Base(folder, corpus, untrained, Path(saved["policy"]), Path(saved["reward"]))


def train(recipe: str, *overrides: str) -> Any:
    loaded, _ = load_checked(recipe, list(overrides))
    return run_recipe(loaded, "plain")


def gold_of(model: Path, prompts: Any, seed: int) -> list[float]:
    """The gold score of one answer to each prompt."""
    template = load_template(str(model), None)
    policy_model = load_causal_lm(ModelConfig(path=str(model)), template.tokenizer, seed=seed, frozen=True)
    engine = ModelEngine.frozen(policy_model)
    rollout = InProcessRollout(
        policy_model.model,
        template.tokenizer,
        template.eos_ids,
        SamplingParams(temperature=1.0, max_new_tokens=TOKENS),
        seed=seed,
        forward_context=engine.forward_context,
        response_prefix=template.response_prefix,
    )
    answers = rollout.generate(prompts.adding(step=0, n=1, purpose="evaluation"))
    return [gold_score(prompt_text(m), text) for m, text in zip(answers.messages, answers.texts, strict=True)]


@dataclass(frozen=True)
class Base:
    """What every run of a seed starts from."""

    folder: Path
    corpus: CorpusPaths
    untrained: Path
    policy: Path
    reward: Path

    def start(self, entry: Entry) -> Path:
        return self.untrained if entry.recipe == "demo_sft" else self.policy

    def teacher(self) -> Path:
        """What PPO with a critic made of the policy."""
        return last_model(self.folder / "runs" / slug(PPO))


def settings_of(entry: Entry, base: Base, seed: int) -> list[str]:
    """The entry's overrides with the data and models of a seed."""
    corpus = base.corpus
    given = [f"output_dir={base.folder / 'runs'}", f"name={slug(entry)}", f"seed={seed}"]
    given += [f"model.path={base.start(entry)}"]
    if entry.recipe == "demo_sft":
        return [*given, f"data.train={corpus.demonstrations}", *entry.overrides]
    if entry.recipe in PAIRS:
        return [*given, f"data.train={corpus.preferences}", f"data.eval={corpus.eval_preferences}", *entry.overrides]
    given += [f"data.train={corpus.train_prompts}", f"data.eval={corpus.eval_prompts}", "evaluation.every=0"]
    given += ["evaluation.prompts=16"]
    given += [] if entry.recipe == "demo_dapo" else [f"reward.model={base.reward}"]
    return [*given, *(text.replace("{teacher}", str(base.teacher())) for text in entry.overrides)]


def slug(entry: Entry) -> str:
    return "".join(c if c.isalnum() else "-" for c in f"{entry.family}-{entry.name}").lower()


def measure(entry: Entry, seed: int, out: Path) -> dict[str, Any]:
    """One run; a failure is a result too."""
    base = prepare(out / f"seed_{seed}", seed)
    found: dict[str, Any] = {"family": entry.family, "name": entry.name, "seed": seed}
    started = time.perf_counter()
    try:
        run = train(entry.recipe, *settings_of(entry, base, seed))
        found |= {"steps": run.summary["steps"], "before": gold_before(base, entry, seed)}
        found |= {"after": mean(gold_of(last_model(run.folder), held_out(base), seed))}
    except TutelageError as error:
        found["error"] = str(error)
    found["seconds"] = round(time.perf_counter() - started, 1)
    return found


def last_model(run: Path) -> Path:
    return max(run.glob("checkpoints/step_*/model"), default=run / "has no checkpoint")


def gold_before(base: Base, entry: Entry, seed: int) -> float:
    """Of the model that an entry starts from, measured once."""
    start = base.start(entry)
    kept = base.folder / f"gold_{start.parent.name if start.name == 'model' else start.name}.json"
    if not kept.exists():
        kept.write_text(json.dumps(mean(gold_of(start, held_out(base), seed))))
    return float(json.loads(kept.read_text()))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def held_out(base: Base) -> Any:
    given = [f"data.train={base.corpus.train_prompts}", f"data.eval={base.corpus.eval_prompts}"]
    loaded, _ = load_checked("demo_grpo", [*given, f"model.path={base.policy}", f"reward.model={base.reward}"])
    return first_prompts(stage_data(loaded.config).prepared.eval, PROMPTS)


def work(task: tuple[Entry, int, Path]) -> dict[str, Any]:
    torch.set_num_threads(1)
    entry, seed, out = task
    log = out / f"seed_{seed}" / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf8") as file:
        sys.stdout = file
        try:
            return measure(entry, seed, out)
        finally:
            sys.stdout = sys.__stdout__


def work_seed(task: tuple[Sequence[Entry], int, Path]) -> int:
    """All entries of one seed, in this process; each result is kept as it comes."""
    entries, seed, out = task
    for entry in entries:
        result = work((entry, seed, out))
        with (out / f"results_{seed}.jsonl").open("a", encoding="utf8") as file:
            file.write(json.dumps(result) + "\n")
        change = f"{result['after'] - result['before']:+.3f}" if "after" in result else result["error"][:150]
        print(f"seed {seed}  {entry.family}: {entry.name}  {change}  ({result['seconds']} s)", flush=True)
    return seed


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(out.glob("results_*.jsonl")) for line in path.read_text().splitlines()]


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| family | name | seeds | steps | gold before | after | change (95 % over seeds) | verdict | s a run |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in ENTRIES:
        rows = [r for r in found if (r["family"], r["name"]) == (entry.family, entry.name)]
        good = [r for r in rows if "after" in r]
        if not rows:
            continue
        if not good:
            lines.append(f"| {entry.family} | {entry.name} | 0 | | | | {rows[0]['error'][:80]} | **failed** | |")
            continue
        change, low, high = mean_interval([r["after"] - r["before"] for r in good])
        before, after = (sum(r[side] for r in good) / len(good) for side in ("before", "after"))
        verdict = "learns" if low > 0 else ("**not shown**" if change > 0 else "**does not learn**")
        seconds = sum(r["seconds"] for r in good) / len(good)
        lines.append(
            f"| {entry.family} | {entry.name} | {len(good)} | {good[0]['steps']} | {before:.2f} | {after:.2f} | "
            f"{change:+.2f} [{low:+.2f}, {high:+.2f}] | {verdict} | {seconds:.0f} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=None, help="names of entries")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="only load every recipe with its overrides")
    parser.add_argument("--write", type=Path, default=None)
    asked = parser.parse_args()
    chosen = [e for e in ENTRIES if asked.only is None or e.name in asked.only]
    if asked.check:
        corpus = CorpusPaths(*(Path("x.jsonl") for _ in CorpusPaths.__dataclass_fields__))
        blank = Base(Path("runs"), corpus, Path("u"), Path("p"), Path("r"))
        for entry in chosen:
            load_checked(entry.recipe, settings_of(entry, blank, 0))
        print(f"{len(chosen)} entries load")
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    done = {(r["family"], r["name"], r["seed"]) for r in results(asked.out)}
    tasks = [
        ([e for e in chosen if (e.family, e.name, seed) not in done], seed, asked.out) for seed in range(asked.seeds)
    ]
    with multiprocessing.get_context("spawn").Pool(asked.workers) as pool:
        for _ in pool.imap_unordered(work_seed, [task for task in tasks if task[0]], chunksize=1):
            pass
    lines = table(results(asked.out))
    print("\n".join(lines))
    if asked.write is not None:
        told = (
            f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, one thread a run"
        )
        heading = ["# Does every algorithm learn?", "", (__doc__ or "").strip(), "", told, ""]
        asked.write.write_text("\n".join([*heading, *lines]) + "\n", encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
