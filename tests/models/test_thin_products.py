"""Products of few rows in blocks, beside sums written out in float64, and the layers of a model that use them."""

from __future__ import annotations

import model_kit as kit
import pytest
import torch
from torch import nn

from tutelage.config.common import ModelConfig
from tutelage.models import thin_products
from tutelage.models.load import load_causal_lm
from tutelage.models.thin_products import MOST_ROWS, ThinLayers, thin_product


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def summed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return (x.double()[:, None] * weight.double()).sum(-1) + (0.0 if bias is None else bias.double())


@pytest.mark.parametrize("rows", [1, 3, 31, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize(("columns", "block"), [(5, 128), (1024, 128), (2500, 128), (288, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_are_the_product(rows, columns, block, bias):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 7, generator=generator), torch.randn(columns, 7, generator=generator)
    bias_O = torch.randn(columns, generator=generator) if bias else None
    found = thin_product(x, weight, bias_O, block)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), summed(x, weight, bias_O), atol=1e-5, rtol=1e-5)


def test_few_rows_go_in_blocks_and_many_do_not(monkeypatch):
    sizes = []
    real = torch.bmm
    monkeypatch.setattr(thin_products.torch, "bmm", lambda a, b: (sizes.append(b.shape[0]), real(a, b))[1])
    weight = torch.randn(2500, 3)
    for rows, blocks in ((1, [19]), (MOST_ROWS, [19]), (MOST_ROWS + 1, [])):
        sizes.clear()
        thin_product(torch.randn(rows, 3), weight)
        assert sizes == blocks


def layers() -> nn.ModuleDict:
    made = {
        "blocks": nn.Linear(128, 512),
        "few outputs": nn.Linear(128, 384),
        "odd": nn.Linear(128, 521),
        "few inputs": nn.Linear(64, 512),
        "narrow": nn.Linear(128, 512, dtype=torch.bfloat16),
        "hooked": nn.Linear(128, 512),
        "own": nn.Linear(128, 512),
        "head": nn.Linear(128, 512),
        "subclass": type("Other", (nn.Linear,), {})(128, 512),
    }
    made["hooked"].register_forward_hook(lambda module, inputs, out: out)
    made["own"].forward = made["own"].forward
    return nn.ModuleDict(made)


def test_only_plain_layers_of_several_blocks_are_taken():
    model = layers()
    before = {name: dict(vars(module)) for name, module in model.items()}
    thin = ThinLayers(model, besides=model["head"])
    with thin.in_blocks():
        taken = [n for n, module in model.items() if vars(module).get("forward") is not before[n].get("forward")]
    # 384 = 4 blocks of 96
    assert taken == ["blocks", "few outputs"]
    assert {name: dict(vars(module)) for name, module in model.items()} == before
    torch.set_num_threads(1)
    assert len(ThinLayers(model)) == 0


def test_an_error_inside_puts_the_layers_back():
    model = nn.Sequential(nn.Linear(128, 512))
    with pytest.raises(RuntimeError), ThinLayers(model).in_blocks():
        model(torch.randn(3, 5))
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("shape", [(3, 1), (4, 1), (2, 90)])
def test_a_model_computes_the_same_in_blocks(tmp_path, shape):
    """Rows of one token are in blocks, 180 rows are not."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    kit.build("llama", head_dim=64, max_position_embeddings=128, **wide).save_pretrained(tmp_path / "wide")
    model = load_causal_lm(ModelConfig(path=str(tmp_path / "wide")), kit.WordTokenizer()).model.eval()
    model.set_attn_implementation("sdpa")
    ids = torch.randint(0, kit.VOCAB, shape, generator=torch.Generator().manual_seed(1))
    thin = ThinLayers(model, besides=model.get_output_embeddings())
    assert len(thin) == 2 * 7
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with thin.in_blocks():
            found = model(input_ids=ids).logits
        again = model(input_ids=ids).logits
    torch.testing.assert_close(found, plain, atol=2e-4, rtol=1e-4)
    assert torch.equal(again, plain)
