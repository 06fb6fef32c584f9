"""Next-token logits beside those of the whole transformers model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tutelage.config.common import ModelConfig
from tutelage.models import next_token
from tutelage.models.load import load_causal_lm
from tutelage.models.next_token import blocked_product, next_token_logits


def plain_model(folder: Path) -> PreTrainedModel:
    """With transformers' own attention, which takes rows side by side."""
    model = load_causal_lm(ModelConfig(path=str(folder))).model.eval()
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("rows", [1, 3, 4, 31, 256, 257])
@pytest.mark.parametrize("columns", [5, 1024, 2500])
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_are_the_product(rows: int, columns: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = torch.randn(rows, 7, generator=generator), torch.randn(columns, 7, generator=generator)
    bias_V = torch.randn(columns, generator=generator) if bias else None
    wanted = (hidden.double()[:, None] * weight.double()).sum(-1) + (0.0 if bias_V is None else bias_V.double())
    found = blocked_product(hidden, weight, bias_V)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


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


def test_few_rows_go_in_blocks_and_many_do_not(monkeypatch) -> None:
    calls = []
    real = torch.mm
    monkeypatch.setattr(next_token.torch, "mm", lambda *args, **kw: (calls.append(1), real(*args, **kw))[1])
    weight = torch.randn(2500, 3)
    for rows, blocks in ((3, 0), (4, 3), (256, 3), (257, 0)):
        calls.clear()
        blocked_product(torch.randn(rows, 3), weight, None)
        assert len(calls) == blocks
