"""The root module of a model's computation: whatever a role computes with the weights runs inside its forward.

FSDP gathers the weights that belong to no block (embeddings, the last norm, the output head) around the forward of one
root module.  An engine reads hidden states and applies the head apart from the model's own forward, and tied weights
are used at both ends, so the root is this module and not the transformers model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Computation(nn.Module):
    """forward(work) returns work(), which computes with `module`; forward(*inputs, work=work, **named) returns
    work(*inputs, **named), for a caller that has to pass tensors through the root.

    What `work` returns is a tensor, or a dict, list or tuple of tensors: FSDP looks for tensors with a gradient in it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, work: Callable[..., Any] | None = None, **named: Any) -> Any:
        if work is None:
            work, *inputs = inputs  # type: ignore[assignment]
        return work(*inputs, **named)
