"""The old logprobs of a step with one update are those of its own forward pass: when, and that nothing else changes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tutelage.algorithms import grpo, ppo
from tutelage.algorithms.mismatch import update_mismatch
from tutelage.algorithms.policy import PolicyLoss, actor_loss
from tutelage.config import GRPOConfig, PPOConfig
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.config.policy_loss import KINDS
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ShapeError
from tutelage.math.policy_loss import PolicyTerms, policy_terms
from tutelage.math.policy_losses import COUPLED_POLICY_LOSSES
from tutelage.models.load import load_causal_lm
from tutelage.roles.actor import Actor
from tutelage.roles.critic import Critic
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.schedules import OneStepOff, Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Outputs, Prompts, Ragged, Rollout, Scores, Sequences

SEPARABLE = [kind for kind in KINDS if kind not in COUPLED_POLICY_LOSSES]
HERE = Path(__file__)


def config(schema: Any = GRPOConfig, **sections: Any) -> Any:
    base = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "rollout": {"max_new_tokens": 6, **({"samples_per_prompt": 4} if schema is GRPOConfig else {})},
    }
    return schema.model_validate({**base, **sections})


def calls(algorithm: Any, cfg: Any) -> list[tuple[str, str]]:
    """Of the roles in one synchronous step."""
    transport = RecordingTransport()
    classes = {"actor": Actor, "reference": Reference, "reward": Reward, "critic": Critic}
    roles = RoleSet({name: transport.handle(name, classes[name]) for name in algorithm.ROLES})
    Synchronous(algorithm, transport, roles, cfg).step("prompts", algorithm.initial_state(cfg))
    return [(n.role, n.method) for n in transport.nodes if n.role != "controller"]


# ---- when


def test_one_update_of_a_synchronous_step_spends_no_pass_on_them() -> None:
    rest = [("actor", "step"), ("actor", "publish")]
    assert calls(grpo, config()) == [
        ("actor", "generate"),
        ("reward", "score"),
        ("reference", "logprobs"),  # the KL in the loss still asks the reference
        *rest,
    ]
    without = config(kl={"coef": 0.0})
    assert calls(grpo, without) == [("actor", "generate"), ("reward", "score"), *rest]
    asked = config(off_policy={"old_logprobs": "trainer"})
    assert calls(grpo, asked)[1] == ("actor", "logprobs")


@pytest.mark.parametrize("kind", [*SEPARABLE, f"{HERE}:own_loss"])
def test_with_every_loss_of_single_tokens_or_responses(kind: str) -> None:
    assert ("actor", "logprobs") not in calls(grpo, config(policy_loss={"kind": kind}))


@pytest.mark.parametrize(
    "sections",
    [
        {"grpo": {"epochs": 2}},
        {"grpo": {"minibatches": 2}},
        {"policy_loss": {"kind": "clip_cov"}},
        {"policy_loss": {"kind": "kl_cov"}},
        {"kl": {"placement": "reward", "estimator": "k1"}},
        {"kl": {"controller": "adaptive"}},
        {"kl": {"budget": 5.0, "on_budget": "lower"}},
        {"kl": {"budget": 5.0, "on_budget": "stop"}},
        {"off_policy": {"correction": "token_truncated"}},
        {"off_policy": {"veto": 1e-4}},
        {"off_policy": {"old_logprobs": "trainer"}},
        {"off_policy": {"old_logprobs": "rollout"}},
        {"schedule": {"kind": "one_step_off"}},
        {"schedule": {"kind": "asynchronous"}},
        {"grpo": {"estimator": "optimal_token_baseline"}},
        {"grpo": {"estimator": f"{HERE}:own_estimator"}},
        {"implementation": "own.py"},
    ],
    ids=str,
)
def test_whatever_needs_them_before_the_update_gets_them(sections: dict[str, Any]) -> None:
    assert ("actor", "logprobs") in calls(grpo, config(**sections))


def test_ppo_needs_them_before_its_updates() -> None:
    assert ("actor", "logprobs") in calls(ppo, config(PPOConfig, ppo={"epochs": 1, "minibatches": 1}))


def own_loss(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> PolicyTerms:
    return policy_terms(-advantage_BT * (logp_BT - old_logp_BT).exp(), logp_BT, old_logp_BT)


def own_estimator(inputs: Any) -> Tensor:
    return inputs.score


# ---- nothing else changes


class Letters:
    """Pays for the share of one token in the response."""

    sources = ()

    def score(self, batch: Rollout) -> Any:
        rows = batch.sequences.responses().rows()
        total = torch.tensor([float((row == 40).float().mean()) for row in rows])
        return Scores(total[:, None], total, ("letters",), (1.0,))


def engine_of(folder: Path, budget: int = 4096) -> ModelEngine:
    optim = OptimConfig(lr=3e-3, schedule="constant")
    model = load_causal_lm(ModelConfig(path=str(folder)))
    return ModelEngine(model, optim, temperature=0.7, tokens_per_micro_batch=budget)


def run(folder: Path, steps: int, made_by: Any = Synchronous, **sections: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Statistics of the steps, and the weights after them, of a recipe on the tiny Llama."""
    cfg = config(rollout={"max_new_tokens": 6, "samples_per_prompt": 4, "temperature": 0.7}, **sections)
    engine = engine_of(folder, 24)
    sampling = SamplingParams(temperature=0.7, max_new_tokens=6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampler = InProcessRollout(engine.model.model, tokenizer, (2,), sampling, seed=0, tokens_in_flight=4096)
    objects = {
        "actor": Actor(engine, sampler, 0.7, lambda folder: nullcontext()),
        "reference": Reference(engine.snapshot(), 0.7, adapter=True),
        "reward": Reward(Letters()),
    }
    transport = LocalTransport()
    roles = RoleSet({n: transport.handle(n, objects[n]) for n in grpo.roles_needed(cfg)})
    made, state, taken, results = made_by(grpo, transport, roles, cfg), grpo.initial_state(cfg), iter(range(steps)), []
    while (result := made.advance(lambda: next((prompts(step) for step in taken), None), state)) is not None:
        results.append({name: stat.mean for name, stat in result.stats.items()})
        state = result.state
    return results, {name: w.detach().clone() for name, w in engine.model.masters.masters.items()}


def prompts(step: int) -> Prompts:
    return Prompts(((5, 6, 7), (8, 9)), (f"{step}a", f"{step}b"), (None, None), ((), ()), step=step, n=4)


@pytest.mark.parametrize(
    "sections",
    [
        {"grpo": {"entropy_coef": 0.01}},
        {"kl": {"coef": 0.1, "estimator": "k3_importance"}, "policy_loss": {"kind": "gspo"}},
        {"kl": {"coef": 0.0}, "policy_loss": {"kind": "sapo"}, "grpo": {"estimator": "rloo"}},
    ],
    ids=["ppo", "gspo", "sapo"],
)
def test_several_steps_are_those_with_the_pass(sections: dict[str, Any], tiny_llama_folder: Path) -> None:
    ours, own_weights = run(tiny_llama_folder, 4, **sections)
    theirs, weights = run(tiny_llama_folder, 4, off_policy={"old_logprobs": "trainer"}, **sections)
    for name, weight in weights.items():
        torch.testing.assert_close(own_weights[name], weight, rtol=0, atol=2e-5)
    start = dict(engine_of(tiny_llama_folder).model.masters.masters)
    moved = max(float((weights[n] - start[n].detach()).abs().max()) for n in weights)
    assert moved > 5e-3, "and they moved"
    for one, other in zip(ours, theirs, strict=True):
        gone = {name for name in other if name.startswith("mismatch/")}
        added = {"policy/mismatch_kl_k1", "policy/mismatch_kl_k3", "policy/mismatch_chi2_token"}
        assert set(one) == set(other) - gone | added
        assert one["policy/ratio_mean"] == 1.0
        assert one["policy/approx_kl"] == 0.0
        assert one["policy/clip_fraction"] == 0.0
        for name in other.keys() & one.keys():
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-5), name
        for name in ("kl_k1", "kl_k3", "chi2_token"):
            assert one[f"policy/mismatch_{name}"] == pytest.approx(other[f"mismatch/{name}"], abs=2e-5)


@pytest.fixture(scope="module")
def batch(tiny_llama_folder: Path) -> Rollout:
    """Five responses with advantages of both signs, the third not counted; old logprobs are the policy's."""
    random = torch.Generator().manual_seed(0)
    lens = ((3, 4), (1, 6), (7, 1), (2, 9), (5, 2))
    rows = [torch.randint(0, 90, (p + r,), generator=random).tolist() for p, r in lens]
    cut = list(zip(rows, lens, strict=True))
    trained = [[True] * r for _, r in lens]
    trained[1][2] = trained[3][5] = False
    made = Sequences.build([row[:p] for row, (p, _) in cut], [row[p:] for row, (p, _) in cut], trained)
    old_logp = engine_of(tiny_llama_folder).logprobs(made, 0.7)
    advantage = torch.tensor([1.5, -1.0, 3.0, -0.7, 0.9])

    def near() -> Ragged:
        return old_logp.with_flat(old_logp.flat + 0.3 * torch.randn(old_logp.flat.shape, generator=random))

    return Rollout(
        sequences=made,
        rollout_logp=near(),
        finished=torch.ones(5, dtype=torch.bool),
        prompt_ids=tuple("aabbb"),
        samples=torch.tensor([0, 1, 0, 1, 2]),
        group=torch.tensor([0, 0, 1, 1, 1]),
        truths=(None,) * 5,
        messages=((),) * 5,
        texts=("",) * 5,
        weights_version=torch.zeros(5, dtype=torch.int64),
        old_logp=old_logp,
        ref_logp=near(),
        advantage=Ragged(torch.repeat_interleave(advantage, made.response_lens), made.response_lens),
        counted=torch.tensor([True, True, False, True, True]),
    )


@pytest.mark.parametrize("kind", [*SEPARABLE, f"{HERE}:own_loss"])
@pytest.mark.parametrize("estimator", ["k3", "k3_importance"])
def test_the_gradient_of_every_loss_is_the_one_from_inferred_logprobs(
    kind: str, estimator: str, batch: Rollout, tiny_llama_folder: Path
) -> None:
    cfg = config(policy_loss={"kind": kind}, kl={"coef": 0.2, "estimator": estimator}, grpo={"entropy_coef": 0.05})
    state = grpo.initial_state(cfg)
    wanted = engine_of(tiny_llama_folder).gradients(batch, actor_loss(cfg, state, batch, 0))
    bare = batch.adding(old_logp=None)
    size = math.sqrt(sum(float(g.double().square().sum()) for g in wanted.values()))
    assert size > 1e-2
    for budget in (12, 4096):
        engine = engine_of(tiny_llama_folder, budget)
        found = engine.gradients(bare, actor_loss(cfg, state, bare, 0, own_old=True))
        apart = math.sqrt(sum(float((found[n] - wanted[n]).double().square().sum()) for n in wanted))
        assert apart <= 2e-5 * size


def test_without_them_a_loss_that_was_not_told_so_refuses(batch: Rollout) -> None:
    out = Outputs(logp=batch.rollout_logp.flat, entropy=torch.zeros(22))
    with pytest.raises(ShapeError, match="old_logp"):
        PolicyLoss(config(), 0.0).items(out, batch.adding(old_logp=None))


def test_the_distance_from_the_sampler_is_a_statistic_of_the_update() -> None:
    """By hand: log ratios of log 2 and log 1/2, and one under the mask."""
    sampler = torch.tensor([-1.0, -2.0, math.nan])
    found = update_mismatch(sampler + torch.tensor([math.log(2), -math.log(2), 9.0]), sampler, torch.tensor([1, 1, 0]))
    means = {name: stat.mean for name, stat in found.items()}
    assert means == {
        "logp_gap": pytest.approx(math.log(2)),
        "mismatch_kl_k1": pytest.approx(0.0, abs=1e-7),
        "mismatch_kl_k3": pytest.approx((2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2),
        "mismatch_chi2_token": pytest.approx((4 + 1 / 4) / 2 - 1),
    }
    assert {stat.weight for stat in found.values()} == {2}


def test_a_step_ahead_has_its_old_logprobs_inferred(tiny_llama_folder: Path) -> None:
    results, _ = run(tiny_llama_folder, 3, OneStepOff, schedule={"kind": "one_step_off"})
    assert "mismatch/kl_k1" in results[-1]
    assert "policy/mismatch_kl_k1" not in results[-1]
