"""Next-token logits beside those of the whole transformers model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tutelage.config.common import ModelConfig
from tutelage.models.load import load_causal_lm
from tutelage.models.next_token import next_token_logits


def plain_model(folder: Path) -> PreTrainedModel:
    """With transformers' own attention, which takes rows side by side."""
    model = load_causal_lm(ModelConfig(path=str(folder))).model.eval()
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("keep", [1, torch.tensor([0, 2, 3, 5])])
def test_logits_are_those_of_the_model(tiny_llama_folder, keep) -> None:
    model = plain_model(tiny_llama_folder)
    ids = torch.tensor([[5, 9, 20, 7, 30, 31]] * 4)
    positions = torch.arange(6)[None].expand(4, -1)
    with torch.no_grad():
        wanted = model(input_ids=ids, position_ids=positions).logits
        wanted = wanted[:, -1:] if isinstance(keep, int) else wanted[:, keep]
        found = next_token_logits(model, keep, input_ids=ids, position_ids=positions)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_head_that_is_more_than_a_matrix_is_called_as_it_is(tiny_llama_folder) -> None:
    """A hook on the head would be passed over by a product of our own."""
    model = plain_model(tiny_llama_folder)
    ids, positions = torch.tensor([[5, 9, 20]] * 5), torch.arange(3)[None]
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        plain = next_token_logits(model, 1, input_ids=ids, position_ids=positions)
        handle = head.register_forward_hook(lambda module, args, out: out + 1)
        hooked = next_token_logits(model, 1, input_ids=ids, position_ids=positions)
        handle.remove()
        seen = []
        handle = model.register_forward_hook(lambda module, args, out: seen.append(out.logits.shape))
        next_token_logits(model, 1, input_ids=ids, position_ids=positions)
        handle.remove()
    torch.testing.assert_close(hooked, plain + 1, atol=1e-5, rtol=1e-5)
    assert len(seen) == 1
