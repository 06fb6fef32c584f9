"""`tutelage demo`: corpus, SFT, reward model, PPO with and without KL, report, on the bundled task.

The stages are the shipped recipes demo_sft, demo_reward_model and demo_ppo, run as `tutelage run` would run them.
Preference labels come from the gold function with noise; training itself never sees it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TextIO

import torch
import typer
from rich.console import Console
from rich.table import Table

from tutelage import runfolder
from tutelage.build import RunResult, run_recipe
from tutelage.config import load_checked
from tutelage.demo.corpus import write_corpus
from tutelage.demo.model import build_model_folder

NO_KL_STEPS = 50
"""Long enough for the learned reward's errors to be exploited, where nothing holds the policy back."""
SFT, REWARD_MODEL, PPO, NO_KL = "1-sft", "2-reward-model", "3-ppo", "4-ppo-without-kl"


def run_demo(folder: Path, seed: int, display: str, stream: TextIO | None = None) -> dict[str, Any]:
    """Everything in one folder; returns and prints what happened to proxy and gold reward.

    stream: where the display writes; default: stdout.

    On one thread: the model's matrices are too small to be shared, and so the numbers do not depend on the core count.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    folder = runfolder.fresh(folder)
    say = (lambda text: None) if display == "json" else typer.echo
    say(f"bundled task, seed {seed}, in {folder}")
    corpus = write_corpus(folder / "data", seed)
    build_model_folder(folder / "model", seed)

    def stage(recipe: str, name: str, *overrides: str) -> RunResult:
        say(f"\n{name}")
        common = (f"output_dir={folder}", f"name={name}", f"seed={seed}")
        loaded, warnings = load_checked(recipe, [*common, *overrides])
        for warning in warnings:
            say(f"warning: {warning}")
        return run_recipe(loaded, display, stream)

    sft = stage("demo_sft", SFT, f"model.path={folder / 'model'}", f"data.train={corpus.demonstrations}")
    pairs = (f"data.train={corpus.preferences}", f"data.eval={corpus.eval_preferences}")
    reward = stage("demo_reward_model", REWARD_MODEL, f"model.path={sft.best_model}", *pairs)
    prompts = (f"data.train={corpus.train_prompts}", f"data.eval={corpus.eval_prompts}")
    models = (f"model.path={sft.best_model}", f"reward.model={reward.best_model}")
    with_kl = stage("demo_ppo", PPO, *models, *prompts)
    without = stage("demo_ppo", NO_KL, *models, *prompts, "kl.coef=0", f"max_steps={NO_KL_STEPS}")
    outcome = {
        "folder": str(folder),
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 1),
        "reward_model_accuracy": reward.summary["after"]["eval/accuracy"],
        "with_kl": outcome_of(with_kl),
        "without_kl": outcome_of(without),
    }
    runfolder.write_json(folder / "demo.json", outcome)
    if display != "json":
        show(outcome)
    return outcome


def outcome_of(run: RunResult) -> dict[str, Any]:
    """Proxy and gold before and after, their paired changes with intervals, and the KL at the end."""
    before, after = run.summary["before"], run.summary["after"]
    return {
        "proxy_before": before["eval/proxy_mean"],
        "proxy_after": after["eval/proxy_mean"],
        "proxy_change": after["proxy_change"],
        "gold_before": before["eval/gold_mean"],
        "gold_after": after["eval/gold_mean"],
        "gold_change": after["gold_change"],
        "kl": after["eval/kl_sequence"],
        "report": str(run.folder / "report.html"),
    }


def show(outcome: dict[str, Any]) -> None:
    table = Table(title="proxy: what the reward model says; gold: what the task is scored by, hidden from training")
    for column in ("run", "proxy", "gold", "gold change (95 % interval)", "KL, nats per answer"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, key in (("PPO with KL", "with_kl"), ("PPO without KL", "without_kl")):
        run = outcome[key]
        change = run["gold_change"]
        table.add_row(
            name,
            f"{run['proxy_before']:.2f} -> {run['proxy_after']:.2f}",
            f"{run['gold_before']:.2f} -> {run['gold_after']:.2f}",
            f"{change['mean']:+.2f} ({change['low']:+.2f} to {change['high']:+.2f})",
            f"{run['kl']:.1f}",
        )
    console = Console()
    console.print(table)
    console.print(f"reward model accuracy on held-out pairs: {outcome['reward_model_accuracy']:.1%}")
    console.print(f"{outcome['seconds']:.0f} s. Reports:\n  {outcome['with_kl']['report']}")
    console.print(f"  {outcome['without_kl']['report']}")
