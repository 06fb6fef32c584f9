"""When the output layer is one matrix, whose logprobs need no whole logits; and that both ways give one answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import model_kit as kit
import pytest
import torch
from torch import Tensor, nn

from tutelage.errors import ModelError
from tutelage.math.linear_head import LinearHead
from tutelage.math.logprobs import Asked, head_outputs
from tutelage.models.language_model import OutputLayer, logits_function


@pytest.mark.parametrize("kind", kit.DECODERS)
def test_the_head_of_a_plain_decoder_is_one_matrix(kind: str) -> None:
    model = kit.build(kind)
    layer = logits_function(model)
    assert isinstance(layer, LinearHead)
    found = layer.linear()
    assert found is not None
    assert found[0] is model.get_output_embeddings().weight
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hidden @ found[0].T, layer(hidden))


def test_a_bias_is_told() -> None:
    head = nn.Linear(4, 9)
    assert OutputLayer(head).linear() == (head.weight, head.bias)


class Doubled(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def hooked(name: str) -> nn.Linear:
    head = nn.Linear(4, 9)
    getattr(head, name)(lambda *_: None)
    return head


def replaced() -> nn.Linear:
    head = nn.Linear(4, 9)
    head.forward = lambda hidden: torch.zeros(len(hidden), 9)  # type: ignore[method-assign]
    return head


@pytest.mark.parametrize(
    "layer",
    [
        OutputLayer(nn.Linear(4, 9), scale=0.5),
        OutputLayer(nn.Linear(4, 9), divisor=8.0),
        OutputLayer(nn.Linear(4, 9), cap=30.0),
        OutputLayer(Doubled(4, 9)),
        OutputLayer(nn.utils.parametrizations.weight_norm(nn.Linear(4, 9))),
        OutputLayer(hooked("register_forward_hook")),
        OutputLayer(hooked("register_forward_pre_hook")),
        OutputLayer(hooked("register_full_backward_hook")),
        OutputLayer(replaced()),
    ],
    ids=["scale", "divisor", "cap", "class", "parametrized", "hook", "pre-hook", "backward hook", "forward"],
)
def test_whatever_else_happens_in_a_head_is_not_passed_over(layer: OutputLayer) -> None:
    assert layer.linear() is None
    hidden, targets = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    found = head_outputs(hidden, targets, layer, Asked(entropy=True))
    p = torch.softmax(layer(hidden).double(), -1)
    torch.testing.assert_close(found["logp"].double(), p.log()[torch.arange(5), targets], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["entropy"].double(), -(p * p.log()).sum(-1), rtol=0, atol=1e-5)


def test_scales_and_caps_come_from_the_configuration() -> None:
    def of(**config: Any) -> OutputLayer:
        return logits_function(
            SimpleNamespace(get_output_embeddings=lambda: nn.Identity(), config=SimpleNamespace(**config))  # type: ignore[arg-type]
        )

    hidden = torch.tensor([[3.0, -60.0]])
    assert of()(hidden).tolist() == [[3.0, -60.0]]
    assert of(logit_scale=0.5)(hidden).tolist() == [[1.5, -30.0]]
    assert of(logits_scaling=8.0)(hidden).tolist() == [[0.375, -7.5]]
    torch.testing.assert_close(of(final_logit_softcapping=30.0)(hidden), 30 * torch.tanh(hidden / 30))
    with pytest.raises(ModelError, match="no output layer"):
        logits_function(SimpleNamespace(get_output_embeddings=lambda: None))  # type: ignore[arg-type]
