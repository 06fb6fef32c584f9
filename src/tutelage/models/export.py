"""Model folders as transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tutelage.models.paths import quiet


def write_folder(
    model: PreTrainedModel, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """config.json, safetensors of `weights` (float32, every parameter by name) with the model's persistent buffers, and
    the tokenizer.  `model` gives the architecture and is not changed."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in _persistent(model)}
    with quiet():
        model.save_pretrained(folder, state_dict={**buffers, **weights})
    # transformers notes the precision of the running copy; the weights were written in float32.
    dtype = model.config.dtype
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    model.config.dtype = dtype
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raises OSError where it cannot be written: the tokenizers library raises a bare Exception."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(f"the tokenizer cannot be written to {folder}: {error}") from error


def _persistent(model: PreTrainedModel) -> set[str]:
    return set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
