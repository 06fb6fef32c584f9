"""The kinds of work that are compared, in the order in which they are run; goals are those of the project."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from install_peers import python_of

from tutelage.errors import installed

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Work:
    """specification  of `inputs.SPECIFICATIONS`.   script, python  of the peer.   extra  what its specification adds.

    goal       times as fast as the peer.
    same_loss  whether both sides start at the same loss (to 1e-3 of it).
    """

    name: str
    specification: str
    peer: str
    script: str
    goal: float
    version: str | None = None
    same_loss: bool = False
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.version is None else python_of(self.version)

    def missing(self) -> str:
        """Why the peer cannot run here; "" where it can."""
        if self.version is not None:
            return "" if self.python.exists() else f"TRL {self.version} is not installed: benchmarks/install_peers.py"
        if ("engine", "vllm") in self.extra:
            return "" if installed("vllm") else "vLLM is not installed: make vllm"
        return ""


WORKS = (
    Work(
        "generation_transformers",
        "generation",
        "transformers generate",
        "generate_side.py",
        3.0,
        extra=(("engine", "transformers"),),
    ),
    Work("generation_vllm", "generation", "vLLM", "generate_side.py", 1.2, extra=(("engine", "vllm"),)),
    Work("grpo", "grpo", "TRL 1.16 GRPOTrainer", "trl_trainers.py", 3.0, "1.16.0"),
    Work("dpo", "dpo", "TRL 1.16 DPOTrainer", "trl_trainers.py", 3.0, "1.16.0", same_loss=True),
    Work("sft", "sft", "TRL 1.16 SFTTrainer", "trl_trainers.py", 1.5, "1.16.0", same_loss=True),
    Work("reward_model", "reward_model", "TRL 1.16 RewardTrainer", "trl_trainers.py", 1.5, "1.16.0", same_loss=True),
    Work("ppo", "ppo", "TRL 1.8 experimental PPOTrainer", "trl_trainers.py", 3.0, "1.8.0"),
)
SHARES = "shares"
"""The last row: shares of the measured multiply rate, without a peer."""
SHARE_GOALS = {"sft": 0.60, "prefill": 0.70, "decode": 0.40}
