"""Losses know nothing of the cut: no statistic of a mini-batch or micro-batch enters them but the weights, once."""

from __future__ import annotations

import pytest
import torch

from tutelage.algorithms import ppo
from tutelage.types import Outputs, Rollout


@pytest.fixture(scope="module")
def built_and_batch(prompts, tiny_llama_folder):
    from details_kit import build, ppo_config

    cfg = ppo_config(
        tiny_llama_folder,
        prompts,
        rollout={"temperature": 2.0, "max_new_tokens": 14, "stop": list("aeiou .0123456789")},
    )
    built = build(cfg)
    batch = built.scored()
    assert len(set(batch.sequences.response_lens.tolist())) > 1, "lengths must differ for the weights to matter"
    return built, batch


def parts_of(batch: Rollout) -> list[torch.Tensor]:
    return [torch.tensor([4, 0]), torch.tensor([1, 2, 5]), torch.tensor([3])]


def test_advantages_are_whitened_over_the_batch_and_not_again_in_its_parts(built_and_batch):
    built, batch = built_and_batch
    mean, std = batch.advantage.flat.mean(), batch.advantage.flat.std()
    assert float(mean) == pytest.approx(0.0, abs=1e-5)
    assert float(std) == pytest.approx(1.0, abs=1e-4)
    logp = batch.old_logp.with_flat(batch.old_logp.flat + 0.05)
    entropy = batch.old_logp.with_flat(torch.ones_like(logp.flat))
    policy, value = ppo.PolicyLoss(built.cfg, 0.0), ppo.ValueLoss(built.cfg)
    new_value = batch.ret.with_flat(batch.ret.flat * 0.5)
    whole = batch.old_logp.with_flat(policy.items(Outputs(logp=logp.flat, entropy=entropy.flat), batch)[0])
    values = batch.ret.with_flat(value.items(Outputs(value=new_value.flat), batch)[0])
    for part in parts_of(batch):
        mini = batch.select(part)
        out = Outputs(logp=logp.select(part).flat, entropy=entropy.select(part).flat, value=new_value.select(part).flat)
        torch.testing.assert_close(policy.items(out, mini)[0], whole.select(part).flat)
        torch.testing.assert_close(value.items(out, mini)[0], values.select(part).flat)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_the_gradient_does_not_depend_on_the_micro_batches(role, aggregation, built_and_batch):
    built, batch = built_and_batch
    cfg = built.cfg.model_copy(update={"ppo": built.cfg.ppo.model_copy(update={"aggregation": aggregation})})
    loss = ppo.PolicyLoss(cfg, 0.0) if role == "actor" else ppo.ValueLoss(cfg)
    engine = built.engine(role)
    found = []
    for budget in (100_000, 40, 1):
        engine.tokens_per_micro_batch = budget
        found.append(engine.gradients(batch, loss))
    assert max(float(g.abs().max()) for g in found[0].values()) > 1e-3
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_that_of_the_mean_over_the_tokens_of_the_mini_batch(built_and_batch, tiny_llama_folder):
    """Against transformers alone: the policy gradient -mean(A grad logp), whose ratio is 1 before any update."""
    from details_kit import plain

    built, batch = built_and_batch
    engine = built.engine("actor")
    engine.tokens_per_micro_batch = 40
    got = engine.gradients(batch, ppo.PolicyLoss(built.cfg, 0.0))
    model = plain(tiny_llama_folder)
    total, tokens = torch.zeros(()), 0
    rows = zip(batch.sequences.tokens.rows(), batch.sequences.prompt_lens.tolist(), batch.advantage.rows(), strict=True)
    for row, prompt, advantage in rows:
        logp = torch.log_softmax(model(input_ids=row[None]).logits[0] / 2.0, dim=-1)
        picked = logp[torch.arange(prompt - 1, len(row) - 1), row[prompt:]]
        total, tokens = total - (advantage * picked).sum(), tokens + len(picked)
    (total / tokens).backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(got) == set(theirs)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5)


class Noted:
    """The roles of an algorithm file; remembers the responses of every mini-batch."""

    def __init__(self):
        self.seen = []

    def update(self, batch, **losses):
        self.seen.append(batch.samples.tolist())
        return {}


def orders(built, batch, step=0, **settings):
    """The order of the responses in every pass, and the sizes of the mini-batches."""
    ppo_settings = built.cfg.ppo.model_copy(update={"epochs": 3, "minibatches": 2})
    cfg = built.cfg.model_copy(update={"ppo": ppo_settings, **settings})
    many = batch.select(torch.arange(18) % len(batch))
    numbered = many.adding(samples=torch.arange(18))
    roles = Noted()
    state = ppo.initial_state(cfg)
    ppo.learn(numbered, roles, cfg, ppo.PolicyState(step, state.kl))
    assert [len(part) for part in roles.seen] == [9] * 6
    return [roles.seen[i] + roles.seen[i + 1] for i in (0, 2, 4)]


def test_minibatches_are_shuffled_anew_in_every_pass_and_step_by_a_key(built_and_batch):
    built, batch = built_and_batch
    first = orders(built, batch)
    assert all(sorted(order) == list(range(18)) for order in first)
    assert first == orders(built, batch), "the same seed and step give the same order"
    assert list(range(18)) not in first
    assert len({tuple(order) for order in first}) == 3, "every pass has an order of its own"
    assert orders(built, batch, step=1) != first
    assert orders(built, batch, seed=1) != first
