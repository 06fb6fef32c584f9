"""What build knows of learning from fresh preferences: the other side of a pair, a reference that moves, alarms."""

from __future__ import annotations

from typing import Any, cast

from tutelage.build import preference, roles
from tutelage.build.data import StageData, section
from tutelage.build.generation import from_mixture, from_reference
from tutelage.build.kit import Kit
from tutelage.config.online_dpo import OnlineDPOConfig, PreferenceConfig, preference_problems
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ConfigError
from tutelage.evals.online_alarms import PreferenceAlarms
from tutelage.roles.reference import Reference


def answering_reference(kit: Kit) -> Reference:
    """The reference as the other side of a pair: it generates too."""
    found = roles.reference(kit)
    found.rollout = from_reference(kit, cast(ModelEngine, found.engine), found.adapter)
    return found


def mixing_reference(kit: Kit) -> Reference:
    """The reference, whose mixture with the policy is the other side of a pair."""
    found, coef = roles.reference(kit), kit.cfg.nash_md.mixture_coef
    found.rollout = from_mixture(kit, cast(ModelEngine, found.engine), found.adapter, coef)
    return found


def moves(cfg: Any) -> bool:
    """Whether the reference follows the policy."""
    return isinstance(cfg, OnlineDPOConfig) and cfg.online_dpo.reference_every is not None


def kl_coef(cfg: Any) -> float:
    """What held-out quality pays per nat of KL: beta; nothing where the reference moves, since its KL does too."""
    return 0.0 if moves(cfg) else float(section(cfg).beta)


def few_prompts(cfg: PreferenceConfig, prompts: int) -> list[str]:
    """Where there are fewer prompts than a step takes, there are fewer pairs too."""
    duels = 1 if isinstance(cfg, OnlineDPOConfig) else cfg.rollout.samples_per_prompt
    minibatches = section(cfg).minibatches
    if prompts >= cfg.rollout.prompts_per_step or prompts * duels >= minibatches:
        return []
    return [
        f"there are {prompts} prompts, so a step has {prompts * duels} pairs, fewer than {cfg.algorithm}.minibatches "
        f"{minibatches}; lower it, or give more prompts"
    ]


def of_run(cfg: PreferenceConfig, data: StageData) -> dict[str, Any]:
    """The fields of the stage that depend on the recipe.  Raises ConfigError for settings that cannot work together."""
    problems = [*preference_problems(cfg, {}), *few_prompts(cfg, len(data.prepared.train))]
    if problems:
        raise ConfigError("; ".join(problems))
    changes: dict[str, Any] = {"alarms": PreferenceAlarms}
    if moves(cfg):
        makers = {"actor": roles.actor, "reference": preference.following_reference, "reward": roles.reward}
        changes |= {"makers": makers, "learners": ("actor", "reference")}
    return changes
