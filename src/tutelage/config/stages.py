"""The stages: the `algorithm` of a recipe -> its schema."""

from __future__ import annotations

from tutelage.config.dpo import DPOConfig
from tutelage.config.grpo import GRPOConfig
from tutelage.config.ppo import PPOConfig
from tutelage.config.reward_model import RewardModelConfig
from tutelage.config.sft import SFTConfig

AnyConfig = SFTConfig | RewardModelConfig | DPOConfig | PPOConfig | GRPOConfig

SCHEMAS: dict[str, type[AnyConfig]] = {
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "dpo": DPOConfig,
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
}
