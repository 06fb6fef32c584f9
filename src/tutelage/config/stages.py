"""The stages: the `algorithm` of a recipe -> its schema."""

from __future__ import annotations

from tutelage.config.ppo import PPOConfig
from tutelage.config.reward_model import RewardModelConfig
from tutelage.config.sft import SFTConfig

AnyConfig = SFTConfig | RewardModelConfig | PPOConfig

SCHEMAS: dict[str, type[AnyConfig]] = {"sft": SFTConfig, "reward_model": RewardModelConfig, "ppo": PPOConfig}
