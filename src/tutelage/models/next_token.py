"""The logits from which the next tokens are drawn: the model's own, the output layer in blocks where that is faster.

Shapes: b rows, N packed tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tutelage.models.language_model import backbone_of, logits_function
from tutelage.models.thin_products import thin_product


def next_token_logits(model: nn.Module, keep: int | Tensor, **inputs: Any) -> Tensor:
    """(rows, positions kept, V) logits, as `model(**inputs, logits_to_keep=keep)` has them, to rounding; no gradient.

    keep    as transformers' `logits_to_keep`: indices of positions, or how many of the last.
    inputs  of the transformer below the output layer.
    """
    head = _plain_head(model)
    if head is None:
        whole: Tensor = model(**inputs, logits_to_keep=keep).logits
        return whole
    assert isinstance(model, PreTrainedModel)
    hidden: Tensor = backbone_of(model)(**inputs).last_hidden_state
    hidden = hidden[:, -keep:] if isinstance(keep, int) else hidden[:, keep]
    weight_VH, bias_V = head
    return thin_product(hidden.flatten(0, 1), weight_VH, bias_V).view(*hidden.shape[:2], -1)


def _plain_head(model: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias where the model is its backbone and one whole matrix on a CPU, and nothing hangs on its call."""
    if not isinstance(model, PreTrainedModel) or model.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    hooks = (model._forward_hooks, model._forward_pre_hooks)
    if any(hooks) or "forward" in vars(model) or model.get_output_embeddings() is None:
        return None
    linear = logits_function(model).linear()
    return linear if linear is not None and linear[0].dtype == torch.float32 else None
