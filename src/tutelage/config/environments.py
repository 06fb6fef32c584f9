"""Schema of the `environment` section: episodes of several turns, and the limits that end them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tutelage.config.schema import OnlyIf, Schema, setting
from tutelage.config.where import at

if TYPE_CHECKING:
    from tutelage.config.generating import GeneratingConfig

ONE_TURN = ("xpo", "nash_md")
HAS_ENVIRONMENT = OnlyIf("environment.functions is given", lambda c: bool(c.environment.functions))


class EnvironmentConfig(Schema):
    functions: dict[str, str] = setting(
        dict,
        "Name -> environment: a built-in one (calculator, number_guessing), module:factory or file.py:factory, each "
        "with settings as name(key=value). Rows choose by a column `environment`; with one, all rows use it.",
    )
    max_turns: int = setting(
        8,
        "Responses of the policy in one episode; one that is not done then is truncated.",
        ge=1,
        only_if=HAS_ENVIRONMENT,
    )
    turn_tokens: int | None = setting(
        None,
        "Length limit of one response; default: what is left of rollout.max_new_tokens, which limits all turns and "
        "observations of an episode together.",
        ge=1,
        only_if=HAS_ENVIRONMENT,
    )
    step_seconds: float = setting(
        30.0, "An environment that has not answered after this many seconds has failed.", gt=0, only_if=HAS_ENVIRONMENT
    )
    workers: int = setting(32, "Environments that work at the same time.", ge=1, only_if=HAS_ENVIRONMENT)


def environment_problems(config: GeneratingConfig, where: Mapping[str, object]) -> Iterator[str]:
    """What cannot work together with environments."""
    settings, schedule = config.environment, config.schedule
    if not settings.functions:
        return
    for name in settings.functions:
        if not name or set(name) & set("/. "):
            yield f"environment.functions has the name {name!r}: metrics carry it, so use letters, digits, - and _"
    if schedule.partial_tokens is not None:
        yield (
            f"schedule.partial_tokens is {schedule.partial_tokens}{at('schedule.partial_tokens', where)} and "
            "environment.functions is given: a call cannot be cut in the middle of an episode; remove partial_tokens"
        )
    if settings.turn_tokens is not None and settings.turn_tokens > config.rollout.max_new_tokens:
        yield (
            f"environment.turn_tokens is {settings.turn_tokens}{at('environment.turn_tokens', where)} and "
            f"rollout.max_new_tokens {config.rollout.max_new_tokens}{at('rollout.max_new_tokens', where)} limits the "
            "whole episode: lower the one, or raise the other"
        )
    if config.algorithm in ONE_TURN:
        yield (
            f"environment.functions is given and algorithm is {config.algorithm}, whose other side answers in one "
            "turn: use an algorithm that learns from the policy's own episodes, such as grpo, ppo or online_dpo"
        )
    if config.rollout.engine == "inprocess":
        yield from _tensor_problems(config, where)


def _tensor_problems(config: GeneratingConfig, where: Mapping[str, object]) -> Iterator[str]:
    """Ranks that compute one response together would each have an environment of their own."""
    cluster = config.cluster
    if cluster.transport == "local":
        return
    role = "actor" if cluster.pool_of("rollout") == cluster.pool_of("actor") else "rollout"
    tensor = cluster.settings_of(role).tensor
    if tensor > 1:
        yield (
            f"the layout of {role} has {tensor} tensor-parallel ranks, and environment.functions is given with "
            "rollout.engine inprocess: each would step environments of its own; use rollout.engine vllm, or tensor 1"
        )
