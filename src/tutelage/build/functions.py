"""Functions that a recipe names: rule rewards, and the gold function of the evaluation."""

from __future__ import annotations

from typing import cast

from tutelage.config import PPOConfig
from tutelage.evals.answers import Gold
from tutelage.rewards.rules import RuleSource, load_rule


def rule_sources(cfg: PPOConfig) -> list[tuple[RuleSource, float]]:
    """Every rule of the recipe with its weight.  Raises RewardError for one that cannot be loaded."""
    return [(RuleSource(rule.function), rule.weight) for rule in cfg.reward.rules]


def load_gold(cfg: PPOConfig) -> Gold | None:
    """`evaluation.gold`, called with (prompt, response); never given to training."""
    return cast(Gold, load_rule(cfg.evaluation.gold)) if cfg.evaluation.gold else None
