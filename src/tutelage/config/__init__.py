"""Torch-free schemas of every recipe, and loading with overrides and hints."""

from __future__ import annotations

from tutelage.config.checks import check_effect, check_sense
from tutelage.config.distill import DistillConfig
from tutelage.config.dpo import DPOConfig
from tutelage.config.generating import GeneratingConfig, PolicyGradientConfig
from tutelage.config.grpo import GRPOConfig
from tutelage.config.kto import KTOConfig
from tutelage.config.loading import (
    Loaded,
    Source,
    dump_config,
    find_recipe,
    load_checked,
    load_recipe,
    load_resolved,
    shipped_recipes,
)
from tutelage.config.online_dpo import NashMDConfig, OnlineDPOConfig, XPOConfig
from tutelage.config.ppo import PPOConfig
from tutelage.config.raft import RAFTConfig
from tutelage.config.reward_model import RewardModelConfig
from tutelage.config.sft import SFTConfig
from tutelage.config.stages import SCHEMAS, AnyConfig

__all__ = [
    "SCHEMAS",
    "AnyConfig",
    "DPOConfig",
    "DistillConfig",
    "GRPOConfig",
    "GeneratingConfig",
    "KTOConfig",
    "Loaded",
    "NashMDConfig",
    "OnlineDPOConfig",
    "PPOConfig",
    "PolicyGradientConfig",
    "RAFTConfig",
    "RewardModelConfig",
    "SFTConfig",
    "Source",
    "XPOConfig",
    "check_effect",
    "check_sense",
    "dump_config",
    "find_recipe",
    "load_checked",
    "load_recipe",
    "load_resolved",
    "shipped_recipes",
]
