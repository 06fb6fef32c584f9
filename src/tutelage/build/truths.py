"""Rules and environments that need ground truths, against the rows of the data: told before a weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from tutelage.build.data import StageData
from tutelage.build.environments import has_environments
from tutelage.build.functions import EVALUATION_RULE
from tutelage.config import AnyConfig, DistillConfig, GeneratingConfig
from tutelage.config.rewards import RuleSettings
from tutelage.errors import DataError
from tutelage.evals.answers import first_prompts
from tutelage.named import parse_spec
from tutelage.rewards.calls import manner_of
from tutelage.rewards.library import NEED_TRUTHS
from tutelage.rewards.loading import REWARD_RULE, load_rule
from tutelage.rollout.environments.builtin import BUILT_IN
from tutelage.rollout.environments.loading import load_environment
from tutelage.types import Prompts

COLUMN = "give the data a column `truth` (data.columns={its name: truth})"


def truth_notes(cfg: AnyConfig, data: StageData) -> list[str]:
    """What to say about rows without the truth that is asked for.  Raises DataError where the run could not use them.

    A row without a truth ends a run whose reward.on_error is stop; under skip it is left out, and only data without
    any truth is refused.  Rules of the user's own may do without: they are told of, where no row has one.
    """
    if not isinstance(cfg, GeneratingConfig):
        return []
    train: Prompts = data.prepared.train
    parts = [(train, f"rows of {cfg.data.train}")]
    if data.prepared.eval is not None:
        asked = first_prompts(data.prepared.eval, cfg.evaluation.prompts)
        parts.append((asked, f"held-out rows of {cfg.data.eval or cfg.data.train}"))
    skip, notes = cfg.reward.on_error == "skip", []
    for prompts, rows in parts:
        for rule in cfg.reward.rules:
            notes += _rule(rule, REWARD_RULE, prompts, rows, skip)
        notes += _environments(cfg, prompts, rows)
    judged = not isinstance(cfg, DistillConfig) or cfg.rewarded
    for prompts, rows in parts[1:] if judged else []:
        for judge in cfg.evaluation.rules:
            notes += _rule(judge, EVALUATION_RULE, prompts, rows, skip or has_environments(cfg))
    return notes


def _rule(rule: RuleSettings, what: str, prompts: Prompts, rows: str, skip: bool) -> list[str]:
    missing = sum(truth is None for truth in prompts.truths)
    if not missing:
        return []
    target, _ = parse_spec(rule.function, what)
    if target in NEED_TRUTHS:
        said = f"{what} {rule.function} needs a truth, and {missing} of {len(prompts)} {rows} have none"
        if skip and missing < len(prompts):
            return [f"{said}: responses to them are left out"]
        raise DataError(
            said, fix=f"{COLUMN}, drop the rule{'' if skip else ', or leave such rows out with reward.on_error=skip'}"
        )
    if ":" not in target or missing < len(prompts):
        return []
    named = manner_of(load_rule(rule.function, settings=rule.settings, what=what), rule.function, what).names
    return [f"{what} {rule.function} asks for the truth, and none of the {rows} has one: it gets None"] * (
        "truth" in named
    )


def _environments(cfg: GeneratingConfig, prompts: Prompts, rows: str) -> list[str]:
    """Built-in environments begin with every row of theirs here; those of the user's own only in the run."""
    notes = []
    for name, spec in cfg.environment.functions.items():
        if parse_spec(spec, name)[0] not in BUILT_IN:
            continue
        world, refused = load_environment(name, spec)(), []
        mine = _rows_of(prompts, name)
        for row in mine:
            try:
                world.reset(prompts.messages[row], prompts.truths[row], 0)
            except DataError as error:
                refused.append(error)
        if not refused:
            continue
        said = f"environment {name} cannot begin with {len(refused)} of {len(mine)} {rows}: {refused[0].what}"
        if len(refused) == len(mine):
            raise DataError(said, fix=f"{refused[0].fix}: {COLUMN}")
        notes.append(f"{said}; responses to them are left out")
    return notes


def _rows_of(prompts: Prompts, name: str) -> Sequence[int]:
    if prompts.environments is None:
        return range(len(prompts))
    return [row for row, world in enumerate(prompts.environments) if world == name]
