"""Schema of the `grpo` stage: responses judged against each other, or against the batch, instead of by a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tutelage.config.generating import PolicyGradientConfig
from tutelage.config.rollouts import KLConfig, PolicySettings, RolloutConfig
from tutelage.config.schema import OnlyIf, setting
from tutelage.config.where import at
from tutelage.errors import closest

ESTIMATORS: tuple[str, ...] = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "grpo_passk",
    "optimal_token_baseline",
    "gdpo",
)
UNGROUPED: frozenset[str] = frozenset({"reinforce_plus_plus", "remax"})
"""Estimators for which one response to a prompt is enough."""


def _one_of(c: Any, names: tuple[str, ...]) -> bool:
    """One of these, or the user's own, which may read everything; a wrong name is told as such, and not by its keys."""
    return c.grpo.estimator in names or c.grpo.estimator not in ESTIMATORS


def grouped(estimator: str) -> bool:
    """Whether a built-in estimator compares the responses to one prompt."""
    return estimator in ESTIMATORS and estimator not in UNGROUPED


KL_ON = OnlyIf("kl.coef is above 0", lambda c: c.kl.coef > 0)
SCALED = OnlyIf(
    "grpo.estimator is grpo, grpo_passk or your own",
    lambda c: _one_of(c, ("grpo", "grpo_passk")),
)
DIVIDED = OnlyIf(
    "grpo.estimator is grpo, grpo_passk with a scale, gdpo or your own",
    lambda c: (
        _one_of(c, ("grpo", "grpo_passk", "gdpo"))
        and (c.grpo.estimator != "grpo_passk" or c.grpo.scale_rewards != "none")
    ),
)
DISCOUNTED = OnlyIf("grpo.estimator is reinforce_plus_plus or your own", lambda c: _one_of(c, ("reinforce_plus_plus",)))
COMPARED = OnlyIf("grpo.estimator compares the responses to a prompt", lambda c: c.grpo.estimator not in UNGROUPED)
REFILLED = OnlyIf("grpo.dynamic_sampling is true", lambda c: c.grpo.dynamic_sampling)
OVERLONG = OnlyIf("grpo.overlong_buffer is above 0", lambda c: c.grpo.overlong_buffer > 0)


class GRPORolloutConfig(RolloutConfig):
    prompts_per_step: int = setting(16, "Prompts of one step.", ge=1)
    samples_per_prompt: int = setting(8, "Responses per prompt: the group; at least 2 where they are compared.", ge=1)


class GRPOSettings(PolicySettings):
    epochs: int = setting(1, "Passes over each rollout batch.", ge=1)
    minibatches: int = setting(1, "Optimiser updates per pass.", ge=1)
    estimator: str = setting(
        "grpo",
        f"How advantages are made of scores: {', '.join(ESTIMATORS)}; or module:function or file.py:function of your "
        "own.",
    )
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_horizon"] = setting(
        "seq_mean_token_mean", "Denominator of the loss; constant_horizon divides by rollout.max_new_tokens."
    )
    scale_rewards: Literal["group", "batch", "none"] = setting(
        "group",
        "Divide by the standard deviation of the scores of the group, or of the whole batch; none: for grpo_passk.",
        only_if=SCALED,
    )
    std_eps: float = setting(1e-4, "Added to that standard deviation.", gt=0, only_if=DIVIDED)
    gamma: float = setting(1.0, "Discount per token of the returns.", gt=0, le=1, only_if=DISCOUNTED)
    dynamic_sampling: bool = setting(
        False,
        "Drop groups whose scores are all equal, and generate for further prompts until rollout.prompts_per_step "
        "groups are left.",
        only_if=COMPARED,
    )
    max_refills: int = setting(
        9, "Further generations that a step may use for this; then it goes on with what it has.", ge=1, only_if=REFILLED
    )
    overlong_filtering: bool = setting(False, "Truncated responses weigh 0 in the loss.")
    overlong_buffer: int = setting(
        0,
        "Tokens before rollout.max_new_tokens over which a response loses score, the more the longer; 0: none.",
        ge=0,
    )
    overlong_factor: float = setting(1.0, "What a response at the limit loses.", gt=0, only_if=OVERLONG)


class GRPOKLConfig(KLConfig):
    coef: float = setting(0.04, "KL coefficient; 0: no reference is built, and no KL is reported.", ge=0)
    placement: Literal["reward", "loss"] = setting(
        "loss", "Per-token penalty in the reward, or a term of the loss.", only_if=KL_ON
    )
    estimator: Literal["k1", "k2", "k3", "k3_unbiased", "k3_importance"] = setting(
        "k3",
        "Reward: k1 (unbiased), k2 or k3. Loss: k2 and k3_unbiased have the gradient of KL(policy || reference), "
        "k3_importance too and when the tokens are those of the old policy, k3 that of KL(reference || policy); k1 is "
        "refused.",
        only_if=KL_ON,
    )


class GRPOConfig(PolicyGradientConfig):
    algorithm: Literal["grpo"] = setting("grpo", "Group relative policy optimisation with actor, reference and reward.")
    rollout: GRPORolloutConfig = setting(GRPORolloutConfig, "Generation.")
    grpo: GRPOSettings = setting(GRPOSettings, "The algorithm.")
    kl: GRPOKLConfig = setting(GRPOKLConfig, "Distance from the reference.")


def grpo_problems(config: GRPOConfig, where: Mapping[str, object], problems: list[str], warnings: list[str]) -> None:
    """Estimator, group and refill, across keys: what cannot work goes to `problems`, what is doubtful to `warnings`."""
    settings, samples = config.grpo, config.rollout.samples_per_prompt
    named = f"grpo.estimator is {settings.estimator}{at('grpo.estimator', where)}"
    few = f"rollout.samples_per_prompt is {samples}{at('rollout.samples_per_prompt', where)}"
    if settings.estimator == "gae":
        problems.append(
            f"{named}: it needs a critic, which this stage has not; it is that of the ppo stage (algorithm: ppo)"
        )
    elif settings.estimator not in ESTIMATORS and ":" not in settings.estimator:
        problems.append(
            f"{named}, which is none.{closest(settings.estimator, ESTIMATORS)} Known: {', '.join(ESTIMATORS)}; your "
            "own is named module:function or file.py:function"
        )
    if grouped(settings.estimator) and samples < 2:
        problems.append(
            f"{few}: a response is judged against the others to its prompt, and alone it would never be trained on; "
            "use at least 2, better 8, or grpo.estimator reinforce_plus_plus or remax"
        )
    if settings.estimator == "grpo" and settings.scale_rewards == "none":
        problems.append(
            f"grpo.scale_rewards is none{at('grpo.scale_rewards', where)} and {named}: without the standard deviation "
            "it is dr_grpo; use that name, or group or batch"
        )
    if settings.estimator == "remax" and config.schedule.kind == "asynchronous":
        problems.append(
            f"{named} and schedule.kind is asynchronous{at('schedule.kind', where)}: the greedy responses belong to a "
            "whole batch of prompts, which asynchronous steps mix; use synchronous or one_step_off"
        )
    if settings.estimator == "remax" and config.environment.functions:
        problems.append(
            f"{named} and environment.functions is given{at('environment.functions', where)}: what an environment pays "
            "is not in the score of a greedy response; use another estimator"
        )
    if settings.overlong_buffer > config.rollout.max_new_tokens:
        problems.append(
            f"grpo.overlong_buffer is {settings.overlong_buffer}{at('grpo.overlong_buffer', where)} and "
            f"rollout.max_new_tokens {config.rollout.max_new_tokens}{at('rollout.max_new_tokens', where)}: every "
            "response would lose score; lower it"
        )
    if settings.dynamic_sampling:
        _refill_problems(config, problems, few, where)
    if settings.estimator == "reinforce_plus_plus" and config.kl.coef > 0 and config.kl.placement == "loss":
        warnings.append(
            f"{named} and kl.placement is loss{at('kl.placement', where)}: REINFORCE++ as published has the KL in the "
            "reward (kl.placement=reward, kl.estimator=k1)"
        )


def _refill_problems(config: GRPOConfig, problems: list[str], few: str, where: Mapping[str, object]) -> None:
    if config.rollout.samples_per_prompt < 2:
        problems.append(
            f"grpo.dynamic_sampling is true{at('grpo.dynamic_sampling', where)} and {few}: one score is always equal "
            "to itself, and every group would be dropped; use at least 2"
        )
    if config.schedule.kind != "synchronous":
        problems.append(
            f"grpo.dynamic_sampling is true{at('grpo.dynamic_sampling', where)} and schedule.kind is "
            f"{config.schedule.kind}{at('schedule.kind', where)}: whether a step needs further "
            "prompts is known only when its scores are, so nothing can be begun ahead; use schedule.kind=synchronous"
        )


def refill_warnings(config: Any, prompts: int, steps: int) -> list[str]:
    """What dynamic sampling may do to a run over `prompts` rows of `steps` steps; nothing without it."""
    if not isinstance(config, GRPOConfig) or not config.grpo.dynamic_sampling:
        return []
    size = min(config.rollout.prompts_per_step, prompts)
    batches = prompts // size * config.epochs
    most = (1 + config.grpo.max_refills) * size
    said = []
    if steps * most > batches * size:
        said.append(
            f"grpo.dynamic_sampling: {steps} steps take at least {steps * size} prompts and with all refills "
            f"{steps * most}; {config.epochs} passes over {prompts} rows have {batches * size}. The run ends when they "
            "are used up; raise epochs so that max_steps decides"
        )
    if most > prompts:
        said.append(
            f"grpo.dynamic_sampling: one step may need {most} prompts (grpo.max_refills {config.grpo.max_refills}), "
            f"more than the {prompts} of a pass: it would see some of them twice"
        )
    return said
