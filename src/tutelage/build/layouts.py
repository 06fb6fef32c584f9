"""Whether the models of a recipe can be cut as its layouts say: read from their configurations before loading."""

from __future__ import annotations

from typing import Any

from tutelage.build.generation import ROLLOUT, generates_elsewhere
from tutelage.config import AnyConfig, DistillConfig, RewardModelConfig
from tutelage.errors import ConfigError
from tutelage.models.load import load_config
from tutelage.models.parallel.pipeline import pipeline_obstacle
from tutelage.models.parallel.tensor import tensor_obstacle
from tutelage.models.parallel.tokens import sequence_obstacle


def require_layouts(cfg: AnyConfig, roles: tuple[str, ...]) -> None:
    """Raises ConfigError for a role whose model cannot be cut so, or that cannot generate so."""
    if cfg.cluster.transport == "local":
        return
    require_whole_base(cfg, roles)
    for role, path in models_of(cfg, roles).items():
        layout = cfg.cluster.layout_of(role)
        if layout.size == 1:
            continue
        config = load_config(path)
        obstacles = [
            tensor_obstacle(config, layout.tensor, layout.sequence) if layout.tensor > 1 else None,
            sequence_obstacle(config, layout.sequence, layout.tensor) if layout.sequence > 1 else None,
            pipeline_obstacle(config, layout.pipeline) if layout.pipeline > 1 else None,
        ]
        for obstacle in obstacles:
            if obstacle is not None:
                raise ConfigError(
                    f"the layout of {role} ({layout}) does not fit {path}: {obstacle}",
                    fix=f"change cluster.layout of {role}, or cluster.pools.{cfg.cluster.pool_of(role)}.devices",
                )
    require_generation(cfg)


def require_whole_base(cfg: AnyConfig, roles: tuple[str, ...]) -> None:
    """A weight that is cut over ranks is not packed."""
    if cfg.model.quantize == "none":
        return
    based = ("reward",) if isinstance(cfg, RewardModelConfig) else ("actor", "critic", "reference")
    for role in (role for role in based if role in roles):
        layout, offload = cfg.cluster.layout_of(role), cfg.cluster.settings_of(role).offload
        if offload or layout.size > layout.replicate:
            raise ConfigError(
                f"model.quantize is {cfg.model.quantize}, and the layout of {role} is "
                f"{'offload' if offload else layout}: a weight that is cut over ranks is not packed",
                fix="use replicas alone (cluster.layout with replicate), or set model.quantize to none",
            )


def require_generation(cfg: Any) -> None:
    """The in-process engine runs whole models: every rank that generates needs all blocks."""
    if not hasattr(cfg, "rollout") or cfg.rollout.engine != "inprocess":
        return
    role = ROLLOUT if generates_elsewhere(cfg) else "actor"
    layout = cfg.cluster.layout_of(role)
    if layout.pipeline > 1:
        raise ConfigError(
            f"the layout of {role} has {layout.pipeline} pipeline stages, and rollout.engine is inprocess: no rank has "
            "the whole model to generate with",
            fix="set rollout.engine=vllm, or a layout without pipeline for the actor",
        )


def models_of(cfg: Any, roles: tuple[str, ...]) -> dict[str, str]:
    """Role -> the folder or name its model comes from."""
    found = dict.fromkeys(roles, cfg.model.path)
    if hasattr(cfg, "rollout") and "reward" in found:
        del found["reward"]
        if cfg.reward.model is not None:
            found["reward"] = cfg.reward.model
    if isinstance(cfg, DistillConfig):
        found["teacher"] = cfg.teacher.path
    if cfg.algorithm == "ppo" and "critic" in found and cfg.critic.init not in ("auto", "policy"):
        found["critic"] = cfg.reward.model if cfg.critic.init == "reward" else cfg.critic.init
    return found
