"""`tutelage check`: everything that can be validated before a weight is loaded."""

from __future__ import annotations

from pathlib import Path

from tutelage.algorithms import algorithm_of
from tutelage.algorithms.grpo import estimator_of
from tutelage.algorithms.judged import loss_named, loss_settings
from tutelage.algorithms.nash_md import preference_named
from tutelage.algorithms.policy import policy_loss_function
from tutelage.build.data import stage_data, training_source
from tutelage.build.functions import held_out_rules, load_gold, rule_sources, with_rule_paths
from tutelage.build.ready import require_extras, require_ready
from tutelage.build.reward_models import require_reward_models
from tutelage.build.stages import build_stage
from tutelage.build.truths import truth_notes
from tutelage.config import (
    AnyConfig,
    DistillConfig,
    GeneratingConfig,
    GRPOConfig,
    NashMDConfig,
    OnlineDPOConfig,
    PolicyGradientConfig,
    PPOConfig,
    RewardModelConfig,
    XPOConfig,
)
from tutelage.config.grpo import refill_warnings
from tutelage.config.loading import Loaded
from tutelage.models.load import require_model, weights_size


def check_recipe(loaded: Loaded) -> list[str]:
    """Lines that say what was found.  Raises TutelageError for what would stop the run."""
    cfg = with_rule_paths(loaded.config, loaded.recipe_path)
    require_extras(cfg)
    lines = []
    if cfg.implementation is not None:
        algorithm_of(cfg)
        lines.append(f"algorithm: {cfg.implementation}, in place of {cfg.algorithm}")
    for role, path in require_named(cfg).items():
        size = weights_size(path)
        lines.append(f"{role}: {path}" + (f" ({size / 1e6:.1f} MB of weights)" if size else ""))
    data = stage_data(cfg)
    lines += [*data.prepared.preflight.lines(), *data.notes, *truth_notes(cfg, data)]
    require_ready(cfg, data, build_stage(cfg, data).names)
    _, steps = training_source(cfg, len(data.prepared.train))
    held_out = 0 if data.prepared.eval is None else len(data.prepared.eval)
    lines.append(f"train: {len(data.prepared.train)} rows, held out: {held_out}, steps: {steps}")
    lines += refill_warnings(cfg, len(data.prepared.train), steps)
    if isinstance(cfg, RewardModelConfig) and cfg.reward_model.folds > 1:
        lines.append(f"cross-validation: {cfg.reward_model.folds} models on grouped folds")
    lines.append(f"run folder: {Path(cfg.output_dir) / cfg.name}")
    return lines


def require_named(cfg: AnyConfig) -> dict[str, str]:
    """Role -> path of every model that a recipe names.

    Raises ModelError, RewardError, ConfigError where a name leads nowhere, or to a model that cannot have that role.
    """
    models = {"model": cfg.model.path}
    if isinstance(cfg, GeneratingConfig):
        if cfg.reward.model is not None:
            models["reward"] = cfg.reward.model
        models |= {f"reward_{i}": path for i, path in enumerate(cfg.reward.ensemble, 1)}
        if isinstance(cfg, PPOConfig) and cfg.critic.init not in ("auto", "reward", "policy"):
            models["critic"] = cfg.critic.init
        if isinstance(cfg, DistillConfig):
            models["teacher"] = cfg.teacher.path
        rule_sources(cfg)
        load_gold(cfg)
        held_out_rules(cfg)
    if isinstance(cfg, PolicyGradientConfig):
        policy_loss_function(cfg.policy_loss.kind)
    if isinstance(cfg, GRPOConfig):
        estimator_of(cfg)
    if isinstance(cfg, OnlineDPOConfig | XPOConfig):
        loss_named(getattr(cfg, cfg.algorithm).loss, loss_settings(cfg))
    if isinstance(cfg, NashMDConfig):
        preference_named(cfg.nash_md.preference)
    for path in models.values():
        require_model(path)
    if isinstance(cfg, GeneratingConfig):
        require_reward_models(cfg)
    return models
