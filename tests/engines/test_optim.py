"""AdamW against its equations in float64, what a resumed optimiser holds, and gradients that need no clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tutelage.config.common import OptimConfig
from tutelage.engines.optim import load_moments, make_optimizer, moments
from tutelage.engines.ranks import clip, gradient_norm
from tutelage.models.precision import MasterWeights

CFG = OptimConfig(lr=1e-2, eps=1e-5, weight_decay=0.1)


def weights() -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=random)) for name, shape in (("w", (3, 5)), ("b", (4,)))}


def gradient(name: str, update: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(update * 10 + len(name)))


def run(masters: dict[str, nn.Parameter], optimizer: torch.optim.AdamW, updates: range) -> None:
    for update in updates:
        for name, master in masters.items():
            master.grad = gradient(name, update, master)
        optimizer.step()


def test_updates_are_those_of_the_equations() -> None:
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w -= lr (wd w + m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps))"""
    masters = weights()
    wanted = {name: master.detach().double().flatten().tolist() for name, master in masters.items()}
    run(masters, make_optimizer(CFG, masters), range(3))
    for name, entries in wanted.items():
        decay = 0.1 if name == "w" else 0.0
        for i, w in enumerate(entries):
            m = v = 0.0
            for t in range(1, 4):
                g = float(gradient(name, t - 1, masters[name]).flatten()[i])
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                w -= 1e-2 * decay * w
                w -= 1e-2 * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-5)
            assert float(masters[name].detach().flatten()[i]) == pytest.approx(w, rel=2e-6, abs=1e-7)


def test_weights_in_float32_are_updated_by_one_kernel_and_others_as_torch_chooses() -> None:
    assert make_optimizer(CFG, weights()).defaults["fused"]
    wide = {name: nn.Parameter(w.detach().bfloat16()) for name, w in weights().items()}
    assert not make_optimizer(CFG, wide).defaults["fused"]


def test_resuming_with_saved_moments_is_bit_for_bit() -> None:
    whole, cut = weights(), weights()
    run(whole, make_optimizer(CFG, whole), range(5))
    first = make_optimizer(CFG, cut)
    run(cut, first, range(2))
    saved = {name: {key: x.clone() for key, x in held.items()} for name, held in moments(first, cut).items()}
    again = {name: nn.Parameter(w.detach().clone()) for name, w in cut.items()}
    second = make_optimizer(CFG, again)
    load_moments(second, again, saved)
    run(again, second, range(2, 5))
    for name in whole:
        assert torch.equal(again[name], whole[name])
    assert saved["w"]["step"].item() == 2, "what was loaded is a copy"


def test_gradients_within_the_limit_are_left_as_they_are_and_others_scaled() -> None:
    masters = weights()
    for name, master in masters.items():
        master.grad = gradient(name, 0, master)
    before = {name: master.grad.clone() for name, master in masters.items()}
    norm = gradient_norm(masters.values())
    assert float(norm) == pytest.approx(math.sqrt(sum(float(g.double().square().sum()) for g in before.values())))
    versions = [master.grad._version for master in masters.values()]
    clip(masters.values(), float(norm) * 1.01, norm)
    assert [master.grad._version for master in masters.values()] == versions, "nothing was written"
    clip(masters.values(), 0.5, norm)
    for name, master in masters.items():
        torch.testing.assert_close(master.grad, before[name] * 0.5 / (float(norm) + 1e-6))


def test_masters_take_the_float32_values_over_without_a_copy() -> None:
    module = nn.Linear(3, 2)
    places = {name: x.data_ptr() for name, x in module.named_parameters()}
    values = {name: x.detach().clone() for name, x in module.named_parameters()}
    masters = MasterWeights(module, torch.bfloat16)
    assert {name: x.data_ptr() for name, x in masters.masters.items()} == places
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(masters.masters[name], values[name])
        assert torch.equal(parameter, values[name].bfloat16())
        assert parameter.data_ptr() != places[name]
    module(torch.ones(1, 3).bfloat16()).sum().backward()
    assert all(x.grad is None for x in module.parameters())
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in masters.masters.values())
    with torch.no_grad():
        masters.masters["weight"] += 1.0
    assert torch.equal(module.weight, values["weight"].bfloat16()), "the copy is another tensor"
    masters.publish()
    assert torch.equal(module.weight, (values["weight"] + 1.0).bfloat16())
