"""The algorithms by name.  Adding one means one file and one entry here, or `module:function` in a recipe."""

from __future__ import annotations

from types import ModuleType

from tutelage.algorithms import ppo, reward_model, sft

ALGORITHMS: dict[str, ModuleType] = {"sft": sft, "reward_model": reward_model, "ppo": ppo}
