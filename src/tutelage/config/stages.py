"""The stages: the `algorithm` of a recipe -> its schema."""

from __future__ import annotations

from tutelage.config.distill import DistillConfig
from tutelage.config.dpo import DPOConfig
from tutelage.config.grpo import GRPOConfig
from tutelage.config.kto import KTOConfig
from tutelage.config.online_dpo import NashMDConfig, OnlineDPOConfig, XPOConfig
from tutelage.config.ppo import PPOConfig
from tutelage.config.raft import RAFTConfig
from tutelage.config.reward_model import RewardModelConfig
from tutelage.config.sft import SFTConfig

AnyConfig = (
    SFTConfig
    | RewardModelConfig
    | DPOConfig
    | KTOConfig
    | PPOConfig
    | GRPOConfig
    | OnlineDPOConfig
    | XPOConfig
    | NashMDConfig
    | DistillConfig
    | RAFTConfig
)

SCHEMAS: dict[str, type[AnyConfig]] = {
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "online_dpo": OnlineDPOConfig,
    "xpo": XPOConfig,
    "nash_md": NashMDConfig,
    "distill": DistillConfig,
    "raft": RAFTConfig,
}
