"""Mistakes that other libraries had to repair, in losses: denominators, signs, groups, adapters, and how work is cut.

docs/results/traps.md lists every trap and the test that catches it; those of rows and models are in test_traps.py.
Shapes: B sequences, T response tokens, N flat tokens, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

import engine_kit
import ranks_kit
from details_kit import distance
from spmd_kit import run_ranks

from tutelage.algorithms import own_samples, policy
from tutelage.algorithms.ppo import PolicyLoss, ValueLoss
from tutelage.algorithms.reward_model import PairLoss
from tutelage.algorithms.sft import SFTLoss
from tutelage.config import GRPOConfig, PPOConfig, RAFTConfig, check_sense
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ConfigError, ModelError
from tutelage.layout import Layout
from tutelage.math.distillation import DIVERGENCES, distillation_loss
from tutelage.math.group_advantages import ESTIMATORS
from tutelage.math.kl import exact_kl, kl_k3, kl_k3_importance, kl_k3_unbiased
from tutelage.types import Demonstrations, Ragged, Rollout, Sequences

# ---- truncated responses in a denominator

LENS = torch.tensor([2, 1, 3, 1, 2, 4])


def column(seed: int, lens: Tensor = LENS) -> Ragged:
    return Ragged(-3 * torch.rand(int(lens.sum()), generator=torch.Generator().manual_seed(seed)), lens)


def responses(**columns: Any) -> Rollout:
    """Six responses of which the last two are left out by the algorithm; the third has a hole."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in LENS.tolist()]
    trained = [[True] * n for n in LENS.tolist()]
    trained[2][1] = False
    six = torch.zeros(6, dtype=torch.int64)
    whole = Rollout(
        sequences=Sequences.build([[5, 6]] * 6, rows, trained), rollout_logp=column(1), finished=six == 0,
        prompt_ids=tuple("aabbcc"), samples=six, group=torch.tensor([0, 0, 1, 1, 2, 2]), truths=(None,) * 6,
        messages=((),) * 6, texts=("",) * 6, weights_version=six, old_logp=column(1), ref_logp=column(2),
        advantage=Ragged(column(3).flat + 1.5, LENS), ret=column(4), value=column(5, LENS + 1),
        counted=torch.tensor([True] * 4 + [False] * 2),
    )  # fmt: skip
    return whole.adding(**columns)


BASE = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"model": "r"}}
WEIGHTS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOConfig, policy),
    "ppo": (PPOConfig, policy),
    "raft": (RAFTConfig, own_samples),
}


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_horizon"])
@pytest.mark.parametrize("algorithm", WEIGHTS)
def test_responses_left_out_of_the_loss_are_in_no_denominator(algorithm: str, aggregation: str) -> None:
    """The weights are those of the same mini-batch without these responses."""
    made, module = WEIGHTS[algorithm]
    cfg = made.model_validate({**BASE, algorithm: {"aggregation": aggregation}, "rollout": {"max_new_tokens": 4}})
    batch, kept = responses(), torch.arange(4)
    found = module.token_weights(batch, cfg)
    alone = module.token_weights(batch.select(kept).adding(counted=None), cfg)
    torch.testing.assert_close(found.select(kept).flat, alone.flat)
    assert not found.select(torch.tensor([4, 5])).flat.any()
    nothing = module.token_weights(batch.adding(counted=torch.zeros(6, dtype=torch.bool)), cfg)
    assert not nothing.flat.any()


# ---- KL that is reported below 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_at_least_0_however_near_the_policies_are(dtype: torch.dtype) -> None:
    near = torch.logspace(-20, 1.3, 20_000, dtype=dtype)
    ratio = torch.cat([near, -near, torch.zeros(1, dtype=dtype)])
    logp = -5 * torch.rand(len(ratio), generator=torch.Generator().manual_seed(0), dtype=dtype)
    for one, other in ((ratio, torch.zeros_like(ratio)), (logp, logp - ratio)):
        for estimator in (kl_k3, kl_k3_unbiased, kl_k3_importance):
            assert float(estimator(one, other).min()) >= 0.0


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-5, 1e-3])
def test_an_exact_divergence_is_at_least_0_and_right_however_near_the_models_are(noise: float) -> None:
    """In float32, where rounding of the softmax alone is larger than the divergence; against float64."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(500, 120, generator=generator)
    other_NV = logits_NV + noise * torch.randn(500, 120, generator=generator)
    p_NV, q_NV = (torch.softmax(x.double(), dim=-1) for x in (logits_NV, other_NV))
    wanted_N = (p_NV * (p_NV / q_NV).log() - p_NV + q_NV).sum(dim=-1)
    found_N = exact_kl(logits_NV, other_NV)
    assert float(found_N.min()) >= 0.0
    torch.testing.assert_close(found_N.double(), wanted_N, rtol=1e-2, atol=1e-10)
    logp_NV, other_logp_NV = (torch.log_softmax(x, dim=-1) for x in (logits_NV, other_NV))
    for kind in DIVERGENCES:
        for count in (120, 20):
            terms = distillation_loss(kind, logp_NV[:, :count], other_logp_NV[:, :count])
            assert float(terms.loss.min()) >= 0.0, (kind, count)


# ---- one response in a method of groups


@pytest.mark.parametrize("name", ESTIMATORS)
def test_one_response_to_a_prompt_is_refused_exactly_where_responses_are_compared(name: str) -> None:
    def recipe(samples: int) -> GRPOConfig:
        rollout = {"samples_per_prompt": samples, "prompts_per_step": 4, "max_new_tokens": 4}
        return GRPOConfig.model_validate({**BASE, "grpo": {"estimator": name, "minibatches": 1}, "rollout": rollout})

    check_sense(recipe(2))
    if name in ("reinforce_plus_plus", "remax"):
        check_sense(recipe(1))
        return
    with pytest.raises(ConfigError, match=r"rollout\.samples_per_prompt is 1"):
        check_sense(recipe(1))


# ---- the adapter that is the reference when it is off


def test_the_adapter_is_on_again_after_the_reference_was_asked_even_in_vain(tiny_llama_folder: Path) -> None:
    """Policy logprobs and gradients are the same before and after, also after a call that failed half-way."""
    engine = engine_kit.policy_engine(tiny_llama_folder, {"lora_rank": 2})
    batch, seqs = engine_kit.batch(), engine_kit.sequences()
    for _ in range(2):
        engine.step(batch, engine_kit.TokenLoss())
    before, gradient = engine.logprobs(seqs, 1.0).flat, engine.gradients(batch, engine_kit.TokenLoss())
    base = engine_kit.policy_engine(tiny_llama_folder).logprobs(seqs, 1.0).flat
    assert float((before - base).abs().max()) > 1e-2, "the adapter has learned"
    torch.testing.assert_close(engine.logprobs(seqs, 1.0, adapter=False).flat, base, rtol=0, atol=1e-6)
    with pytest.raises(ModelError):
        engine.logprobs(Sequences.build([[5] * 600], [[6]]), 1.0, adapter=False)
    assert torch.equal(engine.logprobs(seqs, 1.0).flat, before)
    assert distance(engine.gradients(batch, engine_kit.TokenLoss()), gradient) == 0.0


# ---- one loss and one gradient, however the mini-batch is cut, ordered and split

ORDER = torch.tensor([3, 0, 4, 1, 2])


def ppo_config(aggregation: str) -> PPOConfig:
    own = {"aggregation": aggregation, "entropy_coef": 0.05, "clip_value": 0.2}
    return PPOConfig.model_validate({**BASE, "ppo": own, "rollout": {"max_new_tokens": 4}})


def demonstrations() -> Demonstrations:
    """Five rows of several lengths, some tokens not trained."""
    batch = engine_kit.batch().select(torch.arange(5))
    random, trained = torch.Generator().manual_seed(4), batch.sequences.trained
    holes = torch.rand(len(trained.flat), generator=random) < 0.3
    holes[trained.offsets()[:-1]] = False
    return batch.adding(sequences=replace(batch.sequences, trained=trained.with_flat(~holes)))


def margin_pairs() -> Any:
    return engine_kit.pairs().adding(margin=torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25]))


CASES: dict[str, tuple[str, Callable[[], Any], Any]] = {
    "sft nll": ("policy", demonstrations, SFTLoss("token_mean")),
    "sft by sequence": ("policy", demonstrations, SFTLoss("seq_mean_token_mean")),
    "sft dft": ("policy", demonstrations, SFTLoss("token_mean", "dft")),
    "sft noise": ("policy", demonstrations, SFTLoss("token_mean", noise_alpha=5.0, seed=1, step=2)),
    "reward": ("reward", margin_pairs, PairLoss(0.01, False)),
    "reward margin": ("reward", margin_pairs, PairLoss(0.0, True)),
    "reward scaled": ("reward", margin_pairs, PairLoss(0.01, False, True)),
    **{
        f"{name} {aggregation}": (role, lambda: responses().select(torch.arange(1, 6)), loss(ppo_config(aggregation)))
        for aggregation in ("token_mean", "seq_mean_token_mean", "constant_horizon")
        for name, role, loss in (("policy", "policy", lambda cfg: PolicyLoss(cfg, 0.1)), ("value", "value", ValueLoss))
    },
}  # fmt: skip


def engines(folder: Path, budget: int, layout: Layout | None = None) -> dict[str, ModelEngine]:
    """By role, on the ranks of a layout or in one process."""
    own = {"tokens_per_micro_batch": budget}
    found = {kind: ranks_kit.scalar(folder, kind, layout, **own) for kind in ("reward", "value")}
    return {"policy": ranks_kit.policy(folder, layout, **own), **found}


def computed(made: dict[str, ModelEngine], order: Tensor | None = None) -> dict[str, Any]:
    """(gradient, means of the statistics) of every case."""
    found = {}
    for name, (role, batch_of, loss) in CASES.items():
        batch = batch_of() if order is None else batch_of().select(order)
        stats = made[role].evaluate(batch, loss)
        found[name] = made[role].gradients(batch, loss), {key: stat.mean for key, stat in stats.items()}
    return found


def require_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, (gradient, stats) in theirs.items():
        assert distance(ours[name][0], gradient) < 1e-5, name
        assert ours[name][1] == pytest.approx(stats, rel=1e-4, abs=1e-6), name


@pytest.fixture(scope="module")
def whole(tiny_llama_folder: Path) -> dict[str, Any]:
    """The mini-batch in one pack, in one process."""
    return computed(engines(tiny_llama_folder, 10_000))


def test_micro_batches_packing_and_order_change_neither_loss_nor_gradient(
    whole: dict[str, Any], tiny_llama_folder: Path
) -> None:
    """A budget of 1 token: every row alone, nothing is packed; 30: some are."""
    for budget, order in ((1, None), (30, ORDER), (10_000, ORDER)):
        require_equal(computed(engines(tiny_llama_folder, budget), order), whole)


def on_ranks(rank: int, world: int, folder: Path, layout: str) -> dict[str, Any]:
    return computed(engines(folder, 25, ranks_kit.LAYOUTS[layout]))


@pytest.mark.parametrize("layout", ["shard 2", pytest.param("replicate 2", marks=pytest.mark.slow)])
def test_a_split_over_two_ranks_changes_neither_loss_nor_gradient(
    layout: str, whole: dict[str, Any], tiny_llama_folder: Path
) -> None:
    for found in run_ranks(on_ranks, 2, tiny_llama_folder, layout):
        require_equal(found, whole)
