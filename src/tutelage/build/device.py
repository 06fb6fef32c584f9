"""Where models live."""

from __future__ import annotations

import torch


def device() -> str:
    """CUDA where there is one, else the CPU; CUDA_VISIBLE_DEVICES hides devices as usual."""
    return "cuda" if torch.cuda.is_available() else "cpu"
