"""The algorithms by name.  Adding one means one file and one entry here."""

from __future__ import annotations

from tutelage.algorithms import dpo, grpo, ppo, reward_model, sft
from tutelage.protocols import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    "sft": sft,
    "reward_model": reward_model,
    "dpo": dpo,
    "ppo": ppo,
    "grpo": grpo,
}
