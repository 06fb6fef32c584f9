"""The PPO file against sums worked out token by token in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from tutelage.algorithms import ppo
from tutelage.config import PPOConfig
from tutelage.types import Outputs, Ragged, Rollout, Scores, Sequences


def config(**sections):
    base = {"model": {"path": "m"}, "data": {"train": "d"}, "rollout": {"max_new_tokens": 10}}
    return PPOConfig.model_validate({**base, **sections})


PLAIN = {"whiten_advantages": False, "gamma": 1.0, "lam": 1.0}


def rollout(logp, ref, value, score, finished, trained=None, ret=None, advantage=None):
    """Two or more responses; every per-token argument is a list of lists."""
    flat = lambda rows: Ragged.from_rows([torch.tensor(r, dtype=torch.float32) for r in rows])  # noqa: E731
    count = len(logp)
    total = torch.tensor(score)
    return Rollout(
        sequences=Sequences.build([[1]] * count, [[2] * len(r) for r in logp], trained),
        rollout_logp=flat(logp),
        finished=torch.tensor(finished),
        prompt_ids=tuple(map(str, range(count))),
        samples=torch.zeros(count, dtype=torch.int64),
        group=torch.arange(count),
        truths=(None,) * count,
        messages=((),) * count,
        texts=("",) * count,
        weights_version=torch.zeros(count, dtype=torch.int64),
        old_logp=flat(logp),
        ref_logp=flat(ref),
        value=flat(value),
        score=Scores(total[:, None], total, ("model",)),
        ret=None if ret is None else flat(ret),
        advantage=None if advantage is None else flat(advantage),
    )


def two_rows(**kwargs):
    return rollout(
        logp=[[-1.0, -2.0, -1.0], [-0.5]],
        ref=[[-1.5, -1.0, -1.0], [-1.5]],
        value=[[0.1, 0.2, 0.3, 9.0], [0.4, 7.0]],
        score=[2.0, -1.0],
        finished=[True, False],
        **kwargs,
    )


def test_rewards_to_go_are_score_minus_the_kl_still_to_come():
    cfg = config(ppo=PLAIN, kl={"coef": 0.1})
    batch, state, stats = ppo.advantages(two_rows(), ppo.initial_state(cfg), cfg)
    kl = [[0.5, -1.0, 0.0], [1.0]]
    to_go = [[2.0 - 0.1 * sum(kl[0][t:]) for t in range(3)], [-1.0 - 0.1]]
    value = [[0.1, 0.2, 0.3], [0.4]]
    assert batch.ret.rows()[0].tolist() == pytest.approx(to_go[0])
    assert batch.ret.rows()[1].tolist() == pytest.approx(to_go[1])
    expected = [[g - v for g, v in zip(a, b, strict=True)] for a, b in zip(to_go, value, strict=True)]
    assert [r.tolist() for r in batch.advantage.rows()] == [pytest.approx(e, abs=1e-6) for e in expected]
    assert stats["kl/sequence"].mean == pytest.approx((-0.5 + 1.0) / 2)
    assert stats["kl/token"].mean == pytest.approx((-0.5 + 1.0) / 4)
    assert stats["reward/non_score"].mean == pytest.approx(-0.1 * (-0.5 + 1.0) / 2)
    assert stats["reward/rlhf"].mean == pytest.approx(0.5 - 0.1 * 0.25)
    assert state.step == 1


@pytest.mark.parametrize(
    ("estimator", "penalty"),
    [
        ("k2", [0.5**2 / 2 + 1.0**2 / 2, 1.0**2 / 2]),
        ("k3", [math.exp(-0.5) - 1 + 0.5 + math.exp(1.0) - 1 - 1.0, math.exp(-1.0) - 1 + 1.0]),
    ],
)
def test_the_reported_reward_is_less_the_penalty_of_the_recipes_estimator(estimator, penalty):
    cfg = config(ppo={**PLAIN, "missing_eos_penalty": 3.0}, kl={"coef": 0.1, "estimator": estimator})
    batch, _, stats = ppo.advantages(two_rows(), ppo.initial_state(cfg), cfg)
    first_return = [row.tolist()[0] for row in batch.ret.rows()]
    assert first_return == pytest.approx([2.0 - 0.1 * penalty[0], -1.0 - 3.0 - 0.1 * penalty[1]])
    assert stats["reward/non_score"].mean == pytest.approx(-0.1 * sum(penalty) / 2)
    assert stats["reward/rlhf"].mean == pytest.approx(sum(first_return) / 2)
    assert stats["kl/sequence"].mean == pytest.approx((-0.5 + 1.0) / 2), "the reported KL is k1 all the same"


def test_no_reward_source_can_take_the_name_of_another_metric():
    cfg = config(ppo=PLAIN, kl={"coef": 0.1})
    names = ("score_mean", "score_std", "non_score", "rlhf")
    total = two_rows().score.total
    sources = Scores(torch.arange(8.0).view(2, 4), total, names)
    _, _, plain = ppo.advantages(two_rows(), ppo.initial_state(cfg), cfg)
    _, _, stats = ppo.advantages(two_rows().adding(score=sources), ppo.initial_state(cfg), cfg)
    for k, name in enumerate(names):
        assert stats[f"reward/{name}"].mean == plain[f"reward/{name}"].mean
        assert stats[f"reward/source/{name}"].mean == pytest.approx(k + 2.0)


def test_the_score_goes_to_the_last_token_whose_mask_is_one():
    cfg = config(ppo={**PLAIN, "lam": 0.0}, kl={"coef": 0.0})
    holes = [[True, True, False], [True]]
    batch, _, _ = ppo.advantages(two_rows(trained=holes), ppo.initial_state(cfg), cfg)
    first = batch.ret.rows()[0].tolist()
    assert first == pytest.approx([0.2, 2.0, 0.0])  # lambda 0: r + V of the next trained token; the hole holds nothing


def test_missing_eos_costs_the_truncated_response_only():
    free, fined = (config(ppo={**PLAIN, "missing_eos_penalty": p}, kl={"coef": 0.0}) for p in (0.0, 3.0))
    without, _, _ = ppo.advantages(two_rows(), ppo.initial_state(free), free)
    with_fine, _, _ = ppo.advantages(two_rows(), ppo.initial_state(fined), fined)
    change = [a - b for a, b in zip(with_fine.ret.flat.tolist(), without.ret.flat.tolist(), strict=True)]
    assert change == pytest.approx([0, 0, 0, -3.0])


def test_bootstrap_takes_the_value_after_the_last_token_of_truncated_responses():
    cfg = config(ppo={**PLAIN, "bootstrap_truncated": True}, kl={"coef": 0.0})
    batch, _, _ = ppo.advantages(two_rows(), ppo.initial_state(cfg), cfg)
    assert batch.ret.rows()[1].tolist() == pytest.approx([-1.0 + 7.0])
    assert batch.ret.rows()[0].tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_whitening_uses_the_sample_variance_of_all_tokens_of_the_batch_at_once():
    plain, white = config(ppo=PLAIN), config(ppo={**PLAIN, "whiten_advantages": True})
    raw, _, _ = ppo.advantages(two_rows(), ppo.initial_state(plain), plain)
    done, _, _ = ppo.advantages(two_rows(), ppo.initial_state(white), white)
    values = raw.advantage.flat.double().tolist()
    mean = sum(values) / 4
    sd = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)
    assert done.advantage.flat.tolist() == pytest.approx([(v - mean) / sd for v in values], abs=1e-5)
    assert done.ret.flat.tolist() == pytest.approx(raw.ret.flat.tolist())


def test_whitened_rewards_keep_their_mean_and_reach_the_returns():
    cfg = config(ppo={**PLAIN, "lam": 0.0, "gamma": 1e-6, "whiten_rewards": True}, kl={"coef": 0.0})
    batch, _, _ = ppo.advantages(two_rows(), ppo.initial_state(cfg), cfg)
    rewards = [0.0, 0.0, 2.0, -1.0]
    mean = sum(rewards) / 4
    sd = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
    assert batch.ret.flat.tolist() == pytest.approx([(r - mean) / sd + mean for r in rewards], abs=1e-4)


def test_over_the_budget_the_learning_signal_shrinks_by_budget_over_kl():
    kl = {"coef": 0.0, "budget": 0.1, "on_budget": "lower"}
    free, held = config(ppo=PLAIN, kl={"coef": 0.0}), config(ppo=PLAIN, kl=kl)
    before, _, _ = ppo.advantages(two_rows(), ppo.initial_state(free), free)
    after, _, stats = ppo.advantages(two_rows(), ppo.initial_state(held), held)
    assert stats["kl/budget_scale"].mean == pytest.approx(0.1 / 0.25)
    assert after.advantage.flat.tolist() == pytest.approx([0.4 * a for a in before.advantage.flat.tolist()])


def test_the_adaptive_coefficient_follows_zieglers_rule_and_is_in_the_state():
    cfg = config(ppo=PLAIN, kl={"coef": 0.1, "controller": "adaptive", "target": 0.2, "horizon": 10})
    _, state, stats = ppo.advantages(two_rows(), ppo.initial_state(cfg), cfg)
    error = max(-0.2, min(0.2, 0.25 / 0.2 - 1))
    assert stats["kl/coef"].mean == pytest.approx(0.1)
    assert state.kl.coef == pytest.approx(0.1 * (1 + error * 2 / 10))
    assert ppo.state_from(state.state_dict()) == state


def test_kl_in_the_loss_leaves_the_reward_alone_and_adds_its_gradient():
    cfg = config(ppo=PLAIN, kl={"coef": 0.5, "placement": "loss", "estimator": "k2"})
    batch, state, _ = ppo.advantages(two_rows(), ppo.initial_state(cfg), cfg)
    assert batch.ret.rows()[0].tolist() == pytest.approx([2.0, 2.0, 2.0])
    batch = batch.adding(advantage=batch.advantage.with_flat(torch.zeros(4)))
    logp = batch.old_logp.flat.clone().requires_grad_()
    losses, _ = ppo.PolicyLoss(cfg, state.kl.coef).items(Outputs(logp=logp, entropy=torch.zeros(4)), batch)
    losses.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0.5 * d for d in (0.5, -1.0, 0.0, 1.0)])


def test_entropy_and_approximate_kl_are_averaged_over_real_tokens_only():
    cfg = config(ppo=PLAIN)
    holes = [[True, False, True], [True]]
    batch = two_rows(trained=holes, advantage=[[1.0, 50.0, 1.0], [1.0]])
    logp = batch.old_logp.flat + torch.tensor([0.1, 30.0, 0.0, 0.0])
    entropy = torch.tensor([1.0, 100.0, 2.0, 3.0])
    _, stats = ppo.PolicyLoss(cfg, 0.0).items(Outputs(logp=logp, entropy=entropy), batch)
    assert stats["entropy"].mean == pytest.approx(2.0)
    assert stats["approx_kl"].mean == pytest.approx((math.exp(0.1) - 1 - 0.1) / 3, rel=1e-4)
    assert ppo.token_weights(batch, cfg).flat.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_value_loss_reads_the_values_before_each_token_not_the_bootstrap():
    cfg = config(ppo={**PLAIN, "vf_coef": 0.5, "clip_value": None})
    batch = two_rows(ret=[[1.0, 1.0, 1.0], [2.0]])
    assert ppo.without_bootstrap(batch.value).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    now = torch.tensor([0.0, 1.0, 2.0, 0.0])
    losses, stats = ppo.ValueLoss(cfg).items(Outputs(value=now), batch)
    assert losses.tolist() == pytest.approx([0.25, 0.0, 0.25, 1.0])
    assert stats["error"].mean == pytest.approx((0.5 + 0 + 0.5 + 2) / 4)


def test_explained_variance_is_one_for_perfect_values_and_zero_for_constant_ones():
    mask = torch.tensor([[True, True, False]])
    ret = torch.tensor([[1.0, 3.0, 99.0]])
    assert ppo.explained_variance(ret, ret, mask).mean == pytest.approx(1.0)
    assert ppo.explained_variance(torch.zeros(1, 3), ret, mask).mean == pytest.approx(0.0)
