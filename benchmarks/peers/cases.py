"""The inputs that both sides of `trl_losses.py` get, and the settings of each named loss."""

from __future__ import annotations

from typing import Any

import torch

ROWS, WIDTH = 12, 9
LENS = (9, 4, 1, 7, 5, 3, 8, 2, 6, 9, 3, 5)


def inputs(seed: int = 0) -> dict[str, Any]:
    """Log-probabilities of 12 responses of 1 to 9 tokens, as float32 numbers that JSON carries exactly."""
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.arange(WIDTH)[None] < torch.tensor(LENS)[:, None]).float()

    def normal(scale: float, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(ROWS, WIDTH, generator=draw) * scale + shift) * mask

    logp = normal(0.7, -2.0).clamp(max=-0.05) * mask
    columns = {
        "logp": logp,
        "old_logp": (logp + normal(0.25)).clamp(max=-0.01) * mask,
        "ref_logp": (logp + normal(0.4)).clamp(max=-0.01) * mask,
        "log_collision": normal(0.3, -1.5).clamp(max=-0.05) * mask,
        "mask": mask,
        "advantage": torch.randn(ROWS, generator=draw),
        "scores": torch.randn(ROWS, generator=draw),
        "margin": torch.rand(ROWS // 2, generator=draw),
        "probability": torch.rand(ROWS // 2, generator=draw),
    }
    numbers: dict[str, Any] = {name: x.tolist() for name, x in columns.items()}
    numbers["desirable"] = [True, False, True, True, False, False]
    numbers["policy_wins"] = [True, False, False, True, True, False]
    return numbers


DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss": ["sigmoid"]},
    "robust": {"loss": ["robust"], "label_smoothing": 0.1},
    "hinge": {"loss": ["hinge"]},
    "ipo": {"loss": ["ipo"]},
    "exo_pair": {"loss": ["exo_pair"], "label_smoothing": 0.1},
    "nca_pair": {"loss": ["nca_pair"]},
    "bco_pair": {"loss": ["bco_pair"]},
    "sppo_hard": {"loss": ["sppo_hard"]},
    "aot": {"loss": ["aot"], "label_smoothing": 0.1},
    "aot_unpaired": {"loss": ["aot_unpaired"], "label_smoothing": 0.1},
    "apo_zero": {"loss": ["apo_zero"]},
    "apo_down": {"loss": ["apo_down"]},
    "discopop": {"loss": ["discopop"]},
    "sigmoid_norm": {"loss": ["sigmoid_norm"]},
    "sigmoid, forward KL": {"loss": ["sigmoid"], "divergence": "forward_kl"},
    "sigmoid, JS": {"loss": ["sigmoid"], "divergence": "js_divergence"},
    "sigmoid, alpha 0.5": {"loss": ["sigmoid"], "divergence": "alpha_divergence", "alpha": 0.5},
    "sigmoid, LD-DPO 0.5": {"loss": ["sigmoid"], "ld_alpha": 0.5},
    "sigmoid, WPO": {"loss": ["sigmoid"], "wpo": True},
    "sigmoid, RPO 0.7": {"loss": ["sigmoid", "sft"], "weights": [1.0, 0.7]},
}

REFERENCE_FREE: dict[str, dict[str, Any]] = {
    "orpo": {"trainer": "orpo", "beta": 0.1, "mean": True},
    "cpo": {"trainer": "cpo", "loss": "sigmoid", "beta": 0.1, "cpo_alpha": 1.0, "mean": False},
    "simpo": {"trainer": "cpo", "loss": "simpo", "beta": 2.0, "gamma": 0.5, "mean": True},
    "alphapo": {"trainer": "cpo", "loss": "simpo", "beta": 2.0, "gamma": 0.5, "alpha": 0.25, "mean": True},
}

KTO: dict[str, dict[str, Any]] = {
    "kto": {"loss": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.5},
    "apo_zero_unpaired": {"loss": "apo_zero_unpaired", "beta": 0.1},
}

POLICY: dict[str, dict[str, Any]] = {
    "ppo, sequence mean": {"loss": "grpo"},
    "ppo, token mean": {"loss": "bnpo"},
    "ppo, constant horizon": {"loss": "dr_grpo", "horizon": 16},
    "ppo, clip higher": {"loss": "dapo", "low": 0.2, "high": 0.28},
    "ppo, k3 in the loss": {"loss": "grpo", "beta": 0.1},
    "gspo": {"loss": "grpo", "level": "sequence", "low": 0.03, "high": 0.04},
    "sapo": {"loss": "sapo", "temperature_positive": 1.0, "temperature_negative": 1.05},
    "cispo": {"loss": "cispo", "high": 1.2},
    "gmpo": {"trainer": "gmpo", "loss": "grpo", "low": 0.4, "high": 0.4},
    "dppo_tv": {"trainer": "dppo", "loss": "dppo", "divergence": "binary_tv", "low": 0.02, "high": 0.02},
    "dppo_kl": {"trainer": "dppo", "loss": "dppo", "divergence": "binary_kl", "low": 0.002, "high": 0.002},
}

REWARD_MODEL: dict[str, dict[str, Any]] = {
    "bradley_terry": {},
    "bradley_terry, margin": {"margin": True},
    "bradley_terry, centring 0.01": {"centring": 0.01},
}

BCO = {"bco": {"beta": 0.1}}
XPO = {
    "xpo": {"loss": "sigmoid", "beta": 0.1, "alpha": 0.05},
    "xpo, ipo": {"loss": "ipo", "beta": 0.1, "alpha": 0.05},
}
NASH_MD = {"nash_md": {"beta": 0.1}}


def cases(seed: int = 0) -> dict[str, Any]:
    return {
        **inputs(seed),
        "dpo": DPO,
        "reference_free": REFERENCE_FREE,
        "kto": KTO,
        "policy": POLICY,
        "reward_model": REWARD_MODEL,
        "bco": BCO,
        "xpo": XPO,
        "nash_md": NASH_MD,
    }
