"""Dropout off, in every role: old and new logprobs of one policy must be equal (arXiv:2403.17031)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_NAMES = ("dropout", "pdrop", "layerdrop", "jitter")


def disable_dropout(model: nn.Module) -> nn.Module:
    """Set to 0, in place, everything random that training mode would switch on; returns the model.

    That is p of every dropout module, and every float of a module or of a configuration whose name speaks of dropout,
    layer drop or router jitter: functional dropout reads such numbers.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _zero(module.__dict__)
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "to_dict"):
            _zero_config(config)
    return model


def _zero(attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if isinstance(value, float) and any(word in name.lower() for word in _NAMES):
            attributes[name] = 0.0


def _zero_config(config: Any) -> None:
    for name, value in vars(config).items():
        if isinstance(value, float) and any(word in name.lower() for word in _NAMES):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _zero_config(value)
