"""Functions that a recipe names: rule rewards, and the gold function of the evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from tutelage.config import AnyConfig, GeneratingConfig
from tutelage.errors import RewardError
from tutelage.evals.answers import Gold
from tutelage.rewards.rules import RuleSource, load_rule


def with_rule_paths(cfg: AnyConfig, recipe: Path) -> AnyConfig:
    """Files of code beside the recipe by their full path, which the run folder's copy of the settings needs."""
    if cfg.implementation is not None:
        cfg = cfg.model_copy(update={"implementation": beside(cfg.implementation, recipe.parent)})
    if not isinstance(cfg, GeneratingConfig):
        return cfg
    rules = [rule.model_copy(update={"function": beside(rule.function, recipe.parent)}) for rule in cfg.reward.rules]
    evaluation = cfg.evaluation
    if evaluation.gold is not None:
        evaluation = evaluation.model_copy(update={"gold": beside(evaluation.gold, recipe.parent)})
    return cfg.model_copy(update={"reward": cfg.reward.model_copy(update={"rules": rules}), "evaluation": evaluation})


def beside(function: str, folder: Path) -> str:
    place, colon, name = function.partition(".py:")
    path = folder / f"{place}.py"
    return f"{path.resolve()}:{name}" if colon and path.is_file() else function


def rule_sources(cfg: GeneratingConfig) -> list[tuple[RuleSource, float]]:
    """Every rule of the recipe with its weight.  Raises RewardError for one that cannot be loaded."""
    return [(RuleSource(rule.function), rule.weight) for rule in cfg.reward.rules]


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
    return cast(Gold, load_rule(gold))
