"""Environments of a recipe: made, given to the rows that name them, and put around a rollout engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tutelage.config import GeneratingConfig
from tutelage.config.common import RunConfig
from tutelage.data.prepare import Prepared
from tutelage.errors import DataError, closest
from tutelage.models.language_model import LanguageModel
from tutelage.protocols import RolloutEngine
from tutelage.rollout.environments.driver import Complete, EpisodeLimits, EpisodeRollout
from tutelage.rollout.environments.loading import load_environments
from tutelage.types import Prompts

if TYPE_CHECKING:
    from tutelage.build.kit import Kit


def has_environments(cfg: RunConfig) -> bool:
    return isinstance(cfg, GeneratingConfig) and bool(cfg.environment.functions)


def room_for_a_turn(cfg: GeneratingConfig) -> int:
    """Tokens of context beyond the longest response with which every turn of a batch is one call of the engine."""
    limit = cfg.rollout.max_new_tokens
    return min(cfg.environment.turn_tokens or limit, limit) if has_environments(cfg) else 0


def with_environments(cfg: GeneratingConfig, prepared: Prepared[Prompts]) -> Prepared[Prompts]:
    """Every row with the name of its environment.  Raises DataError where one names none of the recipe's, or none.

    Raises ConfigError for an environment that cannot be made.
    """
    names = tuple(load_environments(cfg.environment.functions))
    if not names and all(part is None or part.environments is None for part in (prepared.train, prepared.eval)):
        return prepared
    held_out = None if prepared.eval is None else _named(prepared.eval, names)
    return replace(prepared, train=_named(prepared.train, names), eval=held_out)


def _named(prompts: Prompts, names: tuple[str, ...]) -> Prompts:
    given = prompts.environments if prompts.environments is not None else ("",) * len(prompts)
    if len(names) == 1:
        given = tuple(name or names[0] for name in given)
    wrong = Counter(name for name in given if name not in names)
    if wrong:
        name, count = wrong.most_common(1)[0]
        said = f"name the environment {name!r}" if name else "name no environment"
        known = f"environment.functions has {', '.join(names)}" if names else "environment.functions is empty"
        raise DataError(
            f"{count} of {len(given)} rows {said}; {known}.{closest(name, names)}",
            fix="correct the column `environment` of the data, rename it with data.columns, or add the environment to "
            "environment.functions",
        )
    return prompts.adding(environments=given)


def most_tokens(kit: Kit, policy: LanguageModel) -> int:
    """Positions that the in-process engine has for a prompt and its response."""
    config: Any = policy.model.config
    bounds = [getattr(config, name, None) for name in ("max_position_embeddings", "sliding_window")]
    return min(kit.cfg.rollout.tokens_in_flight, *(bound for bound in bounds if bound is not None))


def episodes(
    kit: Kit,
    engine: RolloutEngine,
    complete: Complete,
    context: int | None,
    held: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> EpisodeRollout:
    """Episodes around an engine.  context: positions it has for a prompt and its response."""
    from tutelage.build.generation import sampling

    cfg: Any = kit.cfg
    settings = cfg.environment
    limits = EpisodeLimits(
        total_tokens=cfg.rollout.max_new_tokens,
        max_turns=settings.max_turns,
        turn_tokens=settings.turn_tokens,
        step_seconds=settings.step_seconds,
        workers=settings.workers,
        context=context,
    )
    factories = load_environments(settings.functions)
    return EpisodeRollout(engine, complete, sampling(cfg), kit.template, factories, limits, seed=cfg.seed, held=held)
