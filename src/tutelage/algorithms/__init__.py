"""The algorithms by name.  Adding one means one file and one entry here."""

from __future__ import annotations

from typing import Any

from tutelage.algorithms import distill, dpo, grpo, kto, nash_md, online_dpo, ppo, raft, reward_model, sft, xpo
from tutelage.errors import ConfigError
from tutelage.named import load_module
from tutelage.protocols import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    "sft": sft,
    "reward_model": reward_model,
    "dpo": dpo,
    "kto": kto,
    "ppo": ppo,
    "grpo": grpo,
    "online_dpo": online_dpo,
    "xpo": xpo,
    "nash_md": nash_md,
    "distill": distill,
    "raft": raft,
}

NEEDED = ("ROLES", "PREFIXES", "PUBLISHED", "initial_state", "state_from", "collect", "advantages", "learn")


def algorithm_of(cfg: Any) -> Algorithm:
    """The stage's own, or the recipe's `implementation`.  Raises ConfigError for one that is not an algorithm."""
    if cfg.implementation is None:
        return ALGORITHMS[cfg.algorithm]
    found: Algorithm = load_module(cfg.implementation, "algorithm")
    missing = [name for name in NEEDED if not hasattr(found, name)]
    if missing:
        raise ConfigError(
            f"algorithm {cfg.implementation!r} has no {', '.join(missing)}",
            fix=f"give an object or module with {', '.join(NEEDED)}",
        )
    return found
