"""Folders of a recipe as every process of a cluster finds them."""

from __future__ import annotations

from pathlib import Path

from tutelage.config import AnyConfig, DistillConfig, GeneratingConfig, PPOConfig
from tutelage.models.paths import is_local


def with_full_paths(cfg: AnyConfig) -> AnyConfig:
    """The run's folder and the model folders by their full paths: the ranks of a cluster have other working folders."""
    if cfg.cluster.transport == "local":
        return cfg
    changed: dict[str, object] = {
        "output_dir": str(Path(cfg.output_dir).expanduser().absolute()),
        "model": cfg.model.model_copy(update={"path": full(cfg.model.path)}),
    }
    if isinstance(cfg, GeneratingConfig):
        model = None if cfg.reward.model is None else full(cfg.reward.model)
        ensemble = [full(path) for path in cfg.reward.ensemble]
        changed["reward"] = cfg.reward.model_copy(update={"model": model, "ensemble": ensemble})
    if isinstance(cfg, DistillConfig):
        changed["teacher"] = cfg.teacher.model_copy(update={"path": full(cfg.teacher.path)})
    if isinstance(cfg, PPOConfig) and cfg.critic.init not in ("auto", "policy", "reward"):
        changed["critic"] = cfg.critic.model_copy(update={"init": full(cfg.critic.init)})
    return cfg.model_copy(update=changed)


def full(path: str) -> str:
    """A model folder's full path; the name of a model on a hub as it is."""
    return str(Path(path).expanduser().absolute()) if is_local(path) else path
