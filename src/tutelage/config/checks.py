"""Checks of a whole config before anything loads: does each key have an effect, and do they make sense together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tutelage.config import describe
from tutelage.config.cluster_checks import cluster_problems
from tutelage.config.distill import DistillConfig, distill_problems
from tutelage.config.environments import environment_problems
from tutelage.config.generating import GeneratingConfig, PolicyGradientConfig
from tutelage.config.grpo import GRPOConfig, grpo_problems
from tutelage.config.online_dpo import preference_problems
from tutelage.config.policy_loss import policy_loss_problems
from tutelage.config.ppo import PPOConfig
from tutelage.config.raft import raft_problems
from tutelage.config.reward_model import RewardModelConfig
from tutelage.config.where import at
from tutelage.errors import ConfigError

if TYPE_CHECKING:
    from tutelage.config.loading import Loaded
    from tutelage.config.stages import AnyConfig


def check_effect(loaded: Loaded) -> None:
    """Refuse keys that the user set although they change nothing in this run. Raises ConfigError naming all of them.

    A key that is set to null counts as not given, so that an override takes back what a recipe sets.
    """
    problems = []
    for key in describe.walk(type(loaded.config)):
        if not key.condition or key.condition.holds(loaded.config):
            continue
        where = next((s for n, s in loaded.sources.items() if n == key.name or n.startswith(f"{key.name}.")), None)
        value = None if where is None else describe.value_at(loaded.config, key.name)
        if value is not None:
            problems.append(
                f"{key.name} has no effect in this run ({where}, value {describe.value_text(value)}): it needs that "
                f"{key.condition.text}"
            )
    _refuse(problems, "remove the key (KEY=null takes back one without a default), or change the setting it depends on")


def check_sense(config: AnyConfig, sources: Mapping[str, object] | None = None) -> list[str]:
    """Rules across keys: raises ConfigError with every combination that cannot work; returns warnings."""
    where = sources or {}
    problems: list[str] = []
    warnings: list[str] = []
    if config.data.eval is None and config.data.eval_fraction == 0:
        warnings.append(
            f"data.eval_fraction is 0{at('data.eval_fraction', where)} and data.eval is not given: nothing is held "
            "out, so the run cannot show whether it generalises"
        )
    if isinstance(config, GeneratingConfig):
        _generating_problems(config, where, problems)
    if isinstance(config, PolicyGradientConfig):
        _policy_problems(config, where, problems)
        policy_loss_problems(config, where, problems, warnings)
    if isinstance(config, GRPOConfig):
        _grpo_problems(config, where, problems)
        grpo_problems(config, where, problems, warnings)
        if config.kl.coef == 0:
            warnings.append(
                f"kl.coef is 0{at('kl.coef', where)}: nothing holds the policy near its start, no reference is built, "
                "and no KL is reported; follow the gold score, the proxy alone will look good while quality falls"
            )
    if isinstance(config, PPOConfig):
        _ppo_problems(config, where, problems)
        if config.kl.coef == 0:
            warnings.append(
                f"kl.coef is 0{at('kl.coef', where)}: nothing holds the policy near the reference; follow the gold "
                "score and the KL, the proxy reward alone will look good while quality falls"
            )
    if isinstance(config, RewardModelConfig):
        if config.model.lora_rank > 0 and config.reward_model.train_layers == 0:
            problems.append(
                f"model.lora_rank is {config.model.lora_rank}{at('model.lora_rank', where)} and "
                f"reward_model.train_layers is 0{at('reward_model.train_layers', where)}: every adapter would be "
                "frozen; drop one of them"
            )
        if config.reward_model.folds > 1:
            warnings.append(
                f"reward_model.folds is {config.reward_model.folds}{at('reward_model.folds', where)}: the run reports "
                "accuracy over all pairs and keeps no model; evaluation.*, checkpoint.* and tracking do not apply"
            )
    problems += preference_problems(config, where)
    problems += cluster_problems(config, where)
    _refuse(problems, "")
    return warnings


def _ppo_problems(config: PPOConfig, where: Mapping[str, object], problems: list[str]) -> None:
    if config.ppo.vf_coef == 0:
        problems.append(
            f"ppo.vf_coef is 0{at('ppo.vf_coef', where)}: the critic would never learn and its advantages would stay "
            "noise; give it a weight above 0"
        )
    if config.critic.init == "reward" and config.reward.model is None:
        problems.append(
            f"critic.init is reward{at('critic.init', where)} but reward.model is not given; use auto or policy"
        )
    if config.critic.trunk == "own":
        return
    trunk = f"critic.trunk is actor{at('critic.trunk', where)}"
    if config.cluster.transport == "ray":
        problems.append(
            f"{trunk} and cluster.transport is ray{at('cluster.transport', where)}: a value head on the actor's trunk "
            "is of one process; use critic.trunk=own, or cluster.transport=local"
        )
    if config.model.shared_base:
        problems.append(
            f"{trunk} and model.shared_base is true{at('model.shared_base', where)}: the critic has no adapter to put "
            "on the base; use critic.trunk=own, or model.shared_base=false"
        )


def _grpo_problems(config: GRPOConfig, where: Mapping[str, object], problems: list[str]) -> None:
    if config.kl.coef == 0 and config.kl.budget is not None:
        problems.append(
            f"kl.budget is {config.kl.budget:g}{at('kl.budget', where)} and kl.coef is 0{at('kl.coef', where)}: "
            "without a reference no KL is measured; give kl.coef a value above 0, or remove the budget"
        )


def _policy_problems(config: PolicyGradientConfig, where: Mapping[str, object], problems: list[str]) -> None:
    """Of every algorithm with a policy gradient and a KL term."""
    if config.kl.placement == "loss" and config.kl.estimator == "k1":
        problems.append(
            f"kl.placement is loss{at('kl.placement', where)} and kl.estimator is k1{at('kl.estimator', where)}: the "
            "gradient of k1 is zero in expectation, so it holds nothing back; use k2 or k3, or kl.placement=reward"
        )
    if config.kl.placement == "reward" and config.kl.estimator == "k3_unbiased":
        problems.append(
            f"kl.estimator is k3_unbiased{at('kl.estimator', where)} and kl.placement is reward"
            f"{at('kl.placement', where)}: it differs from k3 only in its gradient, and a reward has none; use k1, k2 "
            "or k3, or kl.placement=loss"
        )
    if config.kl.controller == "adaptive" and config.kl.coef == 0:
        problems.append(
            f"kl.controller is adaptive{at('kl.controller', where)} and kl.coef is 0{at('kl.coef', where)}: the "
            "controller multiplies the coefficient, so it would stay 0; start it above 0"
        )
    _horizon_problem(config, where, problems)
    section = config.algorithm
    minibatches = getattr(config, section).minibatches
    batch = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if batch < minibatches:
        problems.append(
            f"rollout.prompts_per_step {config.rollout.prompts_per_step}{at('rollout.prompts_per_step', where)} x "
            f"rollout.samples_per_prompt {config.rollout.samples_per_prompt}"
            f"{at('rollout.samples_per_prompt', where)} is {batch} responses, fewer than {section}.minibatches "
            f"{minibatches}{at(f'{section}.minibatches', where)}: a mini-batch would be empty"
        )


def _generating_problems(config: GeneratingConfig, where: Mapping[str, object], problems: list[str]) -> None:
    """Of every algorithm that learns from its own rollouts."""
    _reward_problems(config, where, problems)
    _schedule_problem(config, where, problems)
    problems += environment_problems(config, where)
    problems += [*distill_problems(config, where), *raft_problems(config, where)]


def _schedule_problem(config: GeneratingConfig, where: Mapping[str, object], problems: list[str]) -> None:
    ahead, limit = config.schedule.ahead, config.schedule.max_staleness
    if config.schedule.kind == "asynchronous" and ahead is not None and ahead > limit:
        problems.append(
            f"schedule.ahead is {ahead}{at('schedule.ahead', where)} and schedule.max_staleness is {limit}"
            f"{at('schedule.max_staleness', where)}: rollouts begun that early would be too old when they are learned "
            "from; lower ahead or raise max_staleness"
        )


def _horizon_problem(config: PolicyGradientConfig, where: Mapping[str, object], problems: list[str]) -> None:
    """One step may change an adaptive coefficient by at most 20 % x sequences / horizon, which must stay under 1."""
    sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if config.kl.controller == "adaptive" and config.kl.horizon <= 0.2 * sequences:
        problems.append(
            f"kl.horizon is {config.kl.horizon}{at('kl.horizon', where)} and a step has {sequences} responses: one "
            f"step could turn the KL coefficient negative; use a horizon above {0.2 * sequences:g}, such as 10000"
        )


def _reward_problems(config: GeneratingConfig, where: Mapping[str, object], problems: list[str]) -> None:
    if config.environment.functions:
        return  # it pays by itself
    if isinstance(config, DistillConfig) and not config.rewarded:
        return  # the teacher is what is learned from
    weights = [rule.weight for rule in config.reward.rules]
    if config.reward.model is not None:
        weights.append(config.reward.weight)
    if config.reward.ensemble:
        weights.append(config.reward.ensemble_weight)
    if not weights:
        problems.append(
            "nothing is rewarded: reward.model, reward.ensemble, reward.rules and environment.functions are all empty; "
            "give at least one of them"
        )
    elif not any(weights):
        problems.append("nothing is rewarded: every weight under reward is 0")


def _refuse(problems: Sequence[str], fix: str) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0], fix=fix)
    if problems:
        raise ConfigError(f"{len(problems)} problems:" + "".join(f"\n  - {p}" for p in problems), fix=fix)
