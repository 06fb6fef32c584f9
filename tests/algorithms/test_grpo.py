"""The GRPO file against sums worked out in plain Python, and whole steps on toy roles and on a tiny model."""

from __future__ import annotations

import math
import statistics
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tutelage.algorithms import grpo, ppo
from tutelage.algorithms.policy import PolicyLoss, token_weights
from tutelage.config import GRPOConfig, PPOConfig
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.models.load import load_causal_lm
from tutelage.roles.actor import Actor
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.schedules import BoundedAsync, OneStepOff, Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Outputs, Prompts, Ragged, Rollout, Scores, Sequences

SCORES = [1.0, 4.0, 2.0, 2.0, 9.0]
GROUPS = [0, 0, 1, 1, 2]
OLD = [[-1.0, -2.0], [-0.5], [-1.0, -1.0, -1.0], [-2.0], [-3.0, -0.1]]
REF = [[-1.5, -1.0], [-1.5], [-1.0, -2.0, -1.0], [-2.5], [-3.0, -0.3]]


def config(schema: Any = GRPOConfig, **sections: Any) -> Any:
    base = {"model": {"path": "m"}, "data": {"train": "d"}, "rollout": {"max_new_tokens": 10}}
    return schema.model_validate({**base, **sections})


def flat(rows: list[list[float]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(r, dtype=torch.float32) for r in rows])


def rollout(**columns: Any) -> Rollout:
    """Two groups of two, and one response alone."""
    total = torch.tensor(SCORES)
    whole = Rollout(
        sequences=Sequences.build([[1]] * 5, [[2] * len(r) for r in OLD]),
        rollout_logp=flat(OLD),
        finished=torch.tensor([True, False, True, True, True]),
        prompt_ids=("a", "a", "b", "b", "c"),
        samples=torch.tensor([0, 1, 0, 1, 0]),
        group=torch.tensor(GROUPS),
        truths=(None,) * 5,
        messages=((),) * 5,
        texts=("",) * 5,
        weights_version=torch.zeros(5, dtype=torch.int64),
        old_logp=flat(OLD),
        ref_logp=flat(REF),
        score=Scores(total[:, None], total, ("model",)),
    )
    return whole.adding(**columns)


def expected(scores: list[float], eps: float) -> list[float]:
    """(r - mean) / (stdev + eps) of the first two groups, 0 for the single one."""
    out = []
    for at in (0, 2):
        own = scores[at : at + 2]
        out += [(r - statistics.mean(own)) / (statistics.stdev(own) + eps) for r in own]
    return [*out, 0.0]


def per_row(batch: Rollout) -> list[list[float]]:
    assert batch.advantage is not None
    return [row.tolist() for row in batch.advantage.rows()]


def test_every_token_of_a_response_has_its_score_against_the_group() -> None:
    cfg = config(grpo={"std_eps": 0.1})
    batch, state, stats = grpo.advantages(rollout(), grpo.initial_state(cfg), cfg)
    wanted = expected(SCORES, 0.1)
    assert per_row(batch) == [pytest.approx([a] * len(r), abs=1e-6) for a, r in zip(wanted, OLD, strict=True)]
    assert batch.counted.tolist() == [True] * 4 + [False]
    assert stats["reward/group_singletons"].mean == 1
    assert stats["reward/group_equal_fraction"].mean == pytest.approx(2 / 4)
    assert stats["reward/group_std"].mean == pytest.approx(statistics.stdev([1, 4]) / 2)
    assert state.step == 1
    assert grpo.state_from(state.state_dict()) == state


def test_a_truncated_response_pays_before_it_is_compared() -> None:
    cfg = config(grpo={"missing_eos_penalty": 5.0})
    batch, _, stats = grpo.advantages(rollout(), grpo.initial_state(cfg), cfg)
    wanted = expected([1.0, -1.0, 2.0, 2.0, 9.0], 1e-4)
    assert [row[0] for row in per_row(batch)] == pytest.approx(wanted, abs=1e-5)
    assert stats["reward/score_mean"].mean == pytest.approx(statistics.mean(SCORES)), "the proxy is reported as it is"


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_in_the_reward_is_summed_over_the_response_and_compared_with_it(estimator: str) -> None:
    cfg = config(kl={"coef": 0.5, "placement": "reward", "estimator": estimator})
    batch, _, stats = grpo.advantages(rollout(), grpo.initial_state(cfg), cfg)
    term = {"k1": lambda d: d, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]
    paid = [-0.5 * sum(term(o - r) for o, r in zip(a, b, strict=True)) for a, b in zip(OLD, REF, strict=True)]
    wanted = expected([s + p for s, p in zip(SCORES, paid, strict=True)], 1e-4)
    assert [row[0] for row in per_row(batch)] == pytest.approx(wanted, abs=1e-4)
    assert stats["reward/non_score"].mean == pytest.approx(statistics.mean(paid))
    k1 = [sum(o - r for o, r in zip(a, b, strict=True)) for a, b in zip(OLD, REF, strict=True)]
    assert stats["kl/sequence"].mean == pytest.approx(statistics.mean(k1))


def test_a_response_alone_in_its_group_is_in_no_denominator_and_gets_no_kl_either() -> None:
    cfg = config()
    batch, state, _ = grpo.advantages(rollout(), grpo.initial_state(cfg), cfg)
    weights = token_weights(batch, cfg)
    assert [row.tolist() for row in weights.rows()] == [
        pytest.approx([w] * len(r)) for w, r in zip([1 / 8, 1 / 4, 1 / 12, 1 / 4, 0.0], OLD, strict=True)
    ]
    part = batch.select(torch.tensor([4, 0]))
    assert [row.tolist() for row in token_weights(part, cfg).rows()] == [[0.0, 0.0], pytest.approx([0.5, 0.5])]
    _, stats = PolicyLoss(cfg, state.kl.coef).items(Outputs(logp=part.old_logp.flat, entropy=torch.ones(4)), part)
    assert stats["entropy"].weight == 2


def test_the_loss_is_the_papers_equation_three() -> None:
    """- 1/G sum_i 1/|o_i| sum_t min(rho A, clip(rho) A) - beta (ref/pi - log(ref/pi) - 1), token by token."""
    cfg = config(kl={"coef": 0.3})
    batch, state, _ = grpo.advantages(rollout(), grpo.initial_state(cfg), cfg)
    shift = [0.3, -0.4, 0.1, 0.0, -0.2, 0.5, 0.05, 7.0, 7.0]
    logp = (batch.old_logp.flat + torch.tensor(shift)).requires_grad_(True)
    loss = PolicyLoss(cfg, state.kl.coef)
    items, stats = loss.items(Outputs(logp=logp, entropy=torch.zeros(9)), batch)
    value = float((items.detach() * loss.weights(batch).flat).sum())
    wanted, at = 0.0, 0
    for a, old, ref in list(zip(expected(SCORES, 1e-4), OLD, REF, strict=True))[:4]:
        for o, r in zip(old, ref, strict=True):
            now = o + shift[at]
            rho = math.exp(now - o)
            surrogate = min(rho * a, max(0.8, min(1.2, rho)) * a)
            wanted -= (surrogate - 0.3 * (math.exp(r - now) - (r - now) - 1)) / len(old) / 4
            at += 1
    assert value == pytest.approx(wanted, rel=1e-5)
    assert "kl_loss" in stats


def test_without_kl_no_reference_is_asked_for_and_none_is_needed() -> None:
    free, held = config(kl={"coef": 0.0}), config()
    assert grpo.roles_needed(free) == ("actor", "reward")
    assert grpo.roles_needed(held) == ("actor", "reference", "reward")
    batch, _, stats = grpo.advantages(rollout(ref_logp=None), grpo.initial_state(free), free)
    assert not any(name.startswith("kl/") for name in stats)
    assert [row[0] for row in per_row(batch)] == pytest.approx(expected(SCORES, 1e-4), abs=1e-5)
    _, loss_stats = PolicyLoss(free, 0.0).items(Outputs(logp=batch.old_logp.flat, entropy=torch.zeros(9)), batch)
    assert "kl_loss" not in loss_stats


def test_the_adaptive_coefficient_moves_and_the_budget_lowers_the_signal() -> None:
    cfg = config(
        kl={"controller": "adaptive", "coef": 0.1, "target": 0.01, "horizon": 10, "budget": 0.1, "on_budget": "lower"}
    )
    batch, state, stats = grpo.advantages(rollout(), grpo.initial_state(cfg), cfg)
    kl = stats["kl/sequence"].mean
    assert state.kl.coef == pytest.approx(0.1 * (1 + 0.2 * 5 / 10))
    assert [row[0] for row in per_row(batch)] == pytest.approx([0.1 / kl * a for a in expected(SCORES, 1e-4)], abs=1e-5)


# ---- correction for the sampler, of both algorithms

STALE = [[-1.0, -2.5], [-0.5], [-1.0, -1.0, -3.0], [-2.2], [-3.0, -0.1]]


def scored(algorithm: Any, **sections: Any) -> tuple[Rollout, Any]:
    cfg = config(GRPOConfig if algorithm is grpo else PPOConfig, **sections)
    batch = rollout(rollout_logp=flat(STALE))
    if algorithm is ppo:
        batch = batch.adding(value=flat([[0.1 * k for k in range(len(r) + 1)] for r in OLD]))
    found, _, stats = algorithm.advantages(batch, algorithm.initial_state(cfg), cfg)
    return found, stats


@pytest.mark.parametrize("algorithm", [grpo, ppo], ids=["grpo", "ppo"])
def test_the_policy_loss_is_weighted_by_trainer_against_sampler(algorithm: Any) -> None:
    plain, without = scored(algorithm)
    fixed, stats = scored(algorithm, off_policy={"correction": "token_truncated", "cap": 1.5})
    ratios = [[math.exp(o - s) for o, s in zip(a, b, strict=True)] for a, b in zip(OLD, STALE, strict=True)]
    for row, unweighted, ratio in zip(per_row(fixed), per_row(plain), ratios, strict=True):
        assert row == pytest.approx([min(x, 1.5) * a for x, a in zip(ratio, unweighted, strict=True)], rel=1e-5)
    every = [x for row in ratios for x in row]
    assert stats["off_policy/ratio_mean"].mean == pytest.approx(statistics.mean(every))
    assert stats["off_policy/ratio_max"].mean == pytest.approx(max(every))
    assert stats["off_policy/truncated_fraction"].mean == pytest.approx(sum(x > 1.5 for x in every) / 9)
    k3 = [math.exp(math.log(x)) - 1 - math.log(x) for x in every]
    assert stats["off_policy/mismatch_kl"].mean == pytest.approx(statistics.mean(k3), rel=1e-5)
    assert not any(name.startswith("off_policy/") for name in without)
    if algorithm is ppo:
        assert torch.equal(fixed.ret.flat, plain.ret.flat), "the critic is not corrected"


@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_a_factor_on_the_advantage_is_the_factor_on_the_loss(dual_clip: float | None) -> None:
    cfg = config(grpo={"dual_clip": dual_clip})
    generator = torch.Generator().manual_seed(0)
    logp, old, advantage = (torch.randn(9, generator=generator) for _ in range(3))
    weight = 2 * torch.rand(9, generator=generator)
    lens = rollout().sequences.response_lens

    def items(adv: torch.Tensor) -> torch.Tensor:
        batch = rollout(ref_logp=None, old_logp=Ragged(old, lens), advantage=Ragged(adv, lens))
        return PolicyLoss(cfg, 0.0).items(Outputs(logp=logp, entropy=torch.zeros(9)), batch)[0]

    torch.testing.assert_close(items(weight * advantage), weight * items(advantage))


def test_old_logprobs_can_be_the_samplers() -> None:
    ours, _ = scored(grpo)
    theirs, stats = scored(grpo, off_policy={"old_logprobs": "rollout"})
    assert ours.old_logp.flat.tolist() == flat(OLD).flat.tolist()
    assert theirs.old_logp.flat.tolist() == flat(STALE).flat.tolist()
    assert stats["policy/logp_gap"].mean == 0


# ---- whole steps


def test_recording_finds_the_data_flow_with_and_without_a_reference() -> None:
    for coef, third in ((0.04, [("reference", "logprobs", (0,))]), (0.0, [])):
        cfg = config(kl={"coef": coef}, grpo={"epochs": 2, "minibatches": 2})
        transport = RecordingTransport()
        classes = {"actor": Actor, "reference": Reference, "reward": Reward}
        roles = RoleSet({name: transport.handle(name, classes[name]) for name in grpo.roles_needed(cfg)})
        Synchronous(grpo, transport, roles, cfg).step("prompts", grpo.initial_state(cfg))
        calls = [(n.role, n.method, n.inputs) for n in transport.nodes]
        before = [("actor", "generate", ()), ("actor", "logprobs", (0,)), ("reward", "score", (0,)), *third]
        assert calls[: len(before)] == before
        assert calls[len(before)] == ("controller", "advantages", tuple(range(len(before))))
        assert [c[:2] for c in calls[len(before) + 1 :]] == [
            *[("actor", "step")] * 4,
            ("actor", "publish"),
            ("controller", "merged_by_role"),
        ]


class Letters:
    """Pays for the share of one token in the response."""

    sources = ()

    def score(self, batch: Rollout) -> Any:
        rows = batch.sequences.responses().rows()
        total = torch.tensor([float((row == 40).float().mean()) for row in rows])
        return Scores(total[:, None], total, ("letters",), (1.0,))


def tiny(folder: Any, **sections: Any) -> tuple[Any, RoleSet, LocalTransport]:
    """GRPO on the tiny Llama, as a run wires it."""
    cfg = config(rollout={"max_new_tokens": 6, "samples_per_prompt": 4}, **sections)
    model_cfg = ModelConfig(path=str(folder))
    policy = load_causal_lm(model_cfg)
    optim = OptimConfig(lr=3e-3, schedule="constant")
    engine = ModelEngine(policy, optim)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampler = InProcessRollout(
        policy.model, tokenizer, (2,), SamplingParams(temperature=1.0, max_new_tokens=6), seed=0, tokens_in_flight=4096
    )
    objects = {
        "actor": Actor(engine, sampler, 1.0, lambda folder: nullcontext()),
        "reference": Reference(engine.snapshot(), 1.0, adapter=True),
        "reward": Reward(Letters()),
    }
    transport = LocalTransport()
    return cfg, RoleSet({n: transport.handle(n, objects[n]) for n in grpo.roles_needed(cfg)}), transport


def prompts_of(step: int) -> Prompts:
    return Prompts(((5, 6, 7), (8, 9)), (f"{step}a", f"{step}b"), (None, None), ((), ()), step=step, n=4)


@pytest.mark.parametrize("kind", ["synchronous", "one step off", "asynchronous"])
def test_grpo_trains_a_tiny_model_under_every_schedule(kind: str, tiny_llama_folder: Any) -> None:
    cfg, roles, transport = tiny(tiny_llama_folder, off_policy={"correction": "token_truncated"})
    made = {
        "synchronous": lambda: Synchronous(grpo, transport, roles, cfg),
        "one step off": lambda: OneStepOff(grpo, transport, roles, cfg),
        "asynchronous": lambda: BoundedAsync(grpo, transport, roles, cfg, max_staleness=2),
    }
    schedule, state, taken, results = made[kind](), grpo.initial_state(cfg), iter(range(5)), []
    draw = lambda: next((prompts_of(step) for step in taken), None)  # noqa: E731
    while (result := schedule.advance(draw, state)) is not None:
        results.append(result.stats)
        state = result.state
    assert len(results) == 5
    first = results[0]
    assert first["kl/sequence"].mean == pytest.approx(0.0, abs=1e-5), "the policy starts as its reference"
    assert first["policy/ratio_mean"].mean == pytest.approx(1.0, abs=1e-5)
    assert first["off_policy/ratio_mean"].mean == pytest.approx(1.0, abs=1e-4)
    gaps = [stats["policy/logp_gap"].mean for stats in results]
    assert (max(gaps) < 1e-4) == (kind == "synchronous"), "stale rollouts are off policy, and only they"
    ages = {"synchronous": None, "one step off": [0, 1, 1, 1, 1], "asynchronous": [0, 1, 2, 2, 2]}[kind]
    if ages is not None:
        assert [stats["schedule/staleness_max"].mean for stats in results] == ages
    assert results[-1]["kl/sequence"].mean != 0.0, "it moved"
