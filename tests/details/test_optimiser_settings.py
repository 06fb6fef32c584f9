"""Adam's epsilon of 1e-5 and the linear decay of the learning rate, as PPO runs get them by default."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tutelage.config.common import OptimConfig
from tutelage.engines.optim import learning_rate, make_optimizer


def test_the_first_step_of_a_gradient_as_small_as_epsilon_is_half_the_learning_rate():
    # Adam's first step is lr g / (|g| + eps): with g = eps = 1e-5 half of lr, with eps 1e-8 nearly all of it
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.full((2, 2), 1e-5)
    make_optimizer(OptimConfig(lr=0.1), {"weight": weight}).step()
    assert weight.detach().flatten().tolist() == pytest.approx([1 - 0.05] * 4, abs=1e-4)


def test_every_trained_role_of_ppo_has_that_epsilon(make_ppo):
    built = make_ppo()
    for role in ("actor", "critic"):
        engine = built.engine(role)
        assert {group["eps"] for group in engine._optimizer.param_groups} == {1e-5}


def test_the_learning_rate_falls_in_a_straight_line():
    cfg = OptimConfig(lr=1.0)
    assert [learning_rate(cfg, u, 4) for u in range(4)] == [1.0, 0.75, 0.5, 0.25]
    warm = OptimConfig(lr=1.0, warmup_steps=2)
    assert [learning_rate(warm, u, 6) for u in range(6)] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])


def test_the_decay_of_ppo_spans_every_update_of_the_run(make_ppo):
    """Two steps of 2 passes with 3 mini-batches: 12 updates, each role from lr down to lr / 12."""
    built = make_ppo(ppo={"epochs": 2, "minibatches": 3}, rollout={"prompts_per_step": 3})
    assert [built.engine(role).total_updates for role in ("actor", "critic")] == [12, 12]
    batch = built.scored()
    rates = [(u["actor"]["lr"].mean, u["critic"]["lr"].mean) for _ in range(2) for u in built.update(batch)]
    expected = [1e-2 * (12 - u) / 12 for u in range(12)]
    assert [actor for actor, _ in rates] == pytest.approx(expected)
    assert [critic for _, critic in rates] == pytest.approx(expected)
