"""Functions that a recipe names: rule rewards, the rules and the gold function of the evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from tutelage.config import AnyConfig, GeneratingConfig
from tutelage.config.rewards import RuleSettings
from tutelage.config.schema import Schema
from tutelage.errors import RewardError
from tutelage.evals.answers import Gold
from tutelage.rewards.loading import REWARD_RULE, load_rule
from tutelage.rewards.rules import RuleSource

EVALUATION_RULE = "evaluation rule"


def with_rule_paths(cfg: AnyConfig, recipe: Path) -> AnyConfig:
    """Files of code beside the recipe by their full path, which the run folder's copy of the settings needs.

    Any setting may name one, as `file.py:name`; `implementation` also as `file.py`.
    """
    found: AnyConfig = _beside(cfg, recipe.parent)
    if found.implementation is not None:
        found = found.model_copy(update={"implementation": beside(found.implementation, recipe.parent)})
    return found


def _beside(value: Any, folder: Path) -> Any:
    if isinstance(value, Schema):
        named = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: new for name, old in named.items() if (new := _beside(old, folder)) is not old}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, str):
        return beside(value, folder) if ".py:" in value else value
    if isinstance(value, list) and any(isinstance(entry, Schema | str) for entry in value):
        return [_beside(entry, folder) for entry in value]
    if isinstance(value, dict) and any(isinstance(entry, Schema | str) for entry in value.values()):
        return {name: _beside(entry, folder) for name, entry in value.items()}
    return value


def beside(function: str, folder: Path) -> str:
    """`file.py:name`, or `file.py`, with the full path where the file is in the folder."""
    place, colon, name = function.partition(".py:")
    path = folder / (f"{place}.py" if colon else function)
    if path.suffix != ".py" or not path.is_file():
        return function
    return f"{path.resolve()}:{name}" if colon else str(path.resolve())


def rule_source(rule: RuleSettings, name: str | None = None, what: str = REWARD_RULE) -> RuleSource:
    """what: how messages call it.  Raises RewardError or MissingExtraError for a rule that cannot be loaded."""
    return RuleSource(
        rule.function,
        name=name,
        settings=rule.settings,
        seconds=rule.seconds,
        concurrency=rule.concurrency,
        what=what,
    )


def rule_sources(cfg: GeneratingConfig) -> list[tuple[RuleSource, float]]:
    """Every rule of the recipe with its weight.  Raises as `rule_source`."""
    return [(rule_source(rule), rule.weight) for rule in cfg.reward.rules]


def held_out_rules(cfg: GeneratingConfig) -> dict[str, RuleSource]:
    """`evaluation.rules` by their names.  Raises as `rule_source`."""
    return {rule.name: rule_source(rule, rule.name, EVALUATION_RULE) for rule in cfg.evaluation.rules}


def load_gold(cfg: GeneratingConfig) -> Gold | None:
    """`evaluation.gold`, called with (prompt, response); never given to training."""
    gold = cfg.evaluation.gold
    if gold is None:
        return None
    if ":" not in gold:
        raise RewardError(
            f"evaluation.gold is {gold!r}, which names no function of yours",
            fix="give module:function or file.py:function, called with (prompt, response)",
        )
    return cast(Gold, load_rule(gold, what="evaluation.gold"))
