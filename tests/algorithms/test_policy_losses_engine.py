"""The policy losses of a recipe on a tiny model: any cut gives one gradient; what a step starts from; corrections."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from spmd_kit import run_ranks
from torch import Tensor
from transformers import AutoTokenizer

from tutelage.algorithms import grpo, ppo
from tutelage.algorithms.policy import (
    CoupledPolicyLoss,
    PolicyLoss,
    actor_loss,
    corrected,
    initial_state,
    policy_loss_function,
    state_from,
    token_weights,
)
from tutelage.config import GRPOConfig, PPOConfig
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.config.policy_loss import KINDS
from tutelage.engines.engine import ModelEngine
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import MeshRanks
from tutelage.errors import ConfigError, ShapeError
from tutelage.layout import Layout
from tutelage.math.entropy_control import AdaptiveEntropy
from tutelage.math.policy_loss import PolicyTerms, policy_terms
from tutelage.math.policy_losses import COUPLED_POLICY_LOSSES, POLICY_LOSSES
from tutelage.models.forward import token_logprobs
from tutelage.models.load import load_causal_lm
from tutelage.roles.actor import Actor
from tutelage.roles.critic import Critic
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.schedules import Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Outputs, Prompts, Ragged, Rollout, Scores, Sequences

LENS = ((3, 4), (1, 6), (7, 1), (2, 9), (5, 2), (4, 4))
TEMPERATURE = 0.7
SECTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "cispo": {"clip_low": 0.2, "clip_high": 0.2},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.2},
    "clip_cov": {"fraction": 0.2, "cov_low": 0.01, "cov_high": 5.0},
    "kl_cov": {"fraction": 0.2},
    "dppo_tv": {"low": 0.02, "high": 0.02},
    "dppo_kl": {"low": 0.002, "high": 0.002},
}
CASES = [*KINDS, "gspo sequence"]


def config(case: str, **sections: Any) -> GRPOConfig:
    kind, _, form = case.partition(" ")
    own = {kind: SECTIONS.get(kind, {}) | ({"form": form} if form else {})} if kind in SECTIONS else {}
    base = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "reward": {"rules": [{"function": "a:b"}]},
        "rollout": {"max_new_tokens": 10, "temperature": TEMPERATURE},
        "policy_loss": {"kind": kind, **own},
        "kl": {"coef": 0.2, "estimator": "k3_importance"},
        "grpo": {"entropy_coef": 0.05},
    }
    return GRPOConfig.model_validate({**base, **sections})


def engine_of(folder: Path, budget: int = 4096, ranks: Any = None) -> ModelEngine:
    sharding = None if ranks is None else ranks.sharding()
    model = load_causal_lm(ModelConfig(path=str(folder)), sharding=sharding)
    optim = OptimConfig(lr=1e-2, schedule="constant")
    return ModelEngine(model, optim, temperature=TEMPERATURE, tokens_per_micro_batch=budget, ranks=ranks)


def sequences() -> Sequences:
    """Six responses, two of them with a hole."""
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 90, (p + r,), generator=random).tolist() for p, r in LENS]
    trained = [[True] * r for _, r in LENS]
    trained[1][2] = trained[3][0] = trained[3][5] = False
    cut = list(zip(rows, LENS, strict=True))
    return Sequences.build([row[:p] for row, (p, _) in cut], [row[p:] for row, (p, _) in cut], trained)


def rollout(logp: Tensor, noise: float = 0.5, **columns: Any) -> Rollout:
    """Old, reference and rollout logprobs around `logp` (R,), one advantage per response, the fifth not counted."""
    random = torch.Generator().manual_seed(1)
    made, count = sequences(), len(LENS)
    lens = made.response_lens

    def near() -> Ragged:
        return Ragged((logp + noise * torch.randn(logp.shape, generator=random)).clamp(max=-1e-3), lens)

    advantage = torch.tensor([1.5, -1.0, 0.5, -0.7, 3.0, 0.9])
    whole = Rollout(
        sequences=made,
        rollout_logp=near(),
        finished=torch.tensor([True, False, True, True, False, True]),
        prompt_ids=tuple("aabbcc"),
        samples=torch.tensor([0, 1, 0, 1, 0, 1]),
        group=torch.tensor([0, 0, 1, 1, 2, 2]),
        truths=(None,) * count,
        messages=((),) * count,
        texts=("",) * count,
        weights_version=torch.zeros(count, dtype=torch.int64),
        old_logp=near(),
        ref_logp=near(),
        advantage=Ragged(torch.repeat_interleave(advantage, lens), lens),
        counted=torch.tensor([True, True, True, True, False, True]),
    )
    return whole.adding(**columns)


def logprobs(folder: Path) -> Tensor:
    return engine_of(folder).logprobs(sequences(), TEMPERATURE).flat


def loss_for(case: str, batch: Rollout) -> PolicyLoss | CoupledPolicyLoss:
    cfg = config(case)
    return actor_loss(cfg, initial_state(cfg), batch, 0)


def require_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], rel: float = 2e-5) -> None:
    assert ours.keys() == theirs.keys()
    difference = math.sqrt(sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours))
    size = math.sqrt(sum(float(theirs[n].double().square().sum()) for n in ours))
    assert size > 1e-3
    assert difference <= rel * size, difference / size


# ---- any cut is one gradient


@pytest.fixture(scope="module")
def batch(tiny_llama_folder: Path) -> Rollout:
    return rollout(logprobs(tiny_llama_folder))


@pytest.fixture(scope="module")
def in_one_piece(tiny_llama_folder: Path, batch: Rollout) -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
    engine = engine_of(tiny_llama_folder)
    return {c: (engine.gradients(batch, loss_for(c, batch)), engine.evaluate(batch, loss_for(c, batch))) for c in CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_value_is_the_weighted_sum_of_the_pure_function_and_its_bonuses(
    case: str, batch: Rollout, in_one_piece: Any, tiny_llama_folder: Path
) -> None:
    cfg, kind = config(case), case.split()[0]
    logp = logprobs(tiny_llama_folder)
    mask = batch.sequences.trained.padded() & batch.counted[:, None]
    columns = [
        Ragged(x, batch.sequences.response_lens).padded() for x in (logp, batch.old_logp.flat, batch.advantage.flat)
    ]
    loss = loss_for(case, batch)
    extra = (loss.order(batch),) if isinstance(loss, CoupledPolicyLoss) else ()
    section = getattr(cfg.policy_loss, kind, None)
    settings = {"clip_low": 0.2, "clip_high": 0.2} if kind == "ppo" else section.model_dump() if section else {}
    terms = (POLICY_LOSSES | COUPLED_POLICY_LOSSES)[kind](*columns, mask, *extra, **settings)
    d_ref, d_old = (columns[0] - Ragged(x.flat, x.lens).padded() for x in (batch.ref_logp, batch.old_logp))
    kl = d_old.exp() * (torch.expm1(-d_ref) + d_ref)
    weights = token_weights(batch, cfg).padded()
    _, stats = in_one_piece[case]
    with torch.no_grad():
        flat = token_logprobs(engine_of(tiny_llama_folder).model, batch.sequences, TEMPERATURE, True)[1]
    entropy = Ragged(flat, batch.sequences.response_lens).padded()
    value = float(((terms.loss + 0.2 * kl - 0.05 * entropy) * weights).sum())
    assert stats["loss"].mean == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert stats["entropy"].mean == pytest.approx(float(entropy[mask].mean()), rel=1e-4)
    assert stats["kl_loss"].mean == pytest.approx(float(kl[mask].mean()), rel=1e-4)
    assert stats["clip_fraction"].weight == int(mask.sum())
    assert ("cov_selected_fraction" in stats) == (kind in COUPLED_POLICY_LOSSES)
    assert "entropy_coef" not in stats


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_and_order_change_nothing(
    case: str, batch: Rollout, in_one_piece: Any, tiny_llama_folder: Path
) -> None:
    gradients, stats = in_one_piece[case]
    shuffled = batch.select(torch.tensor([5, 2, 0, 4, 3, 1]))
    for budget, rows in itertools.product((12, 4096), (batch, shuffled)):
        engine = engine_of(tiny_llama_folder, budget)
        require_close(engine.gradients(rows, loss_for(case, rows)), gradients)
        again = engine.evaluate(rows, loss_for(case, rows))
        assert again.keys() == stats.keys()
        for name, stat in again.items():
            assert stat.mean == pytest.approx(stats[name].mean, rel=1e-4, abs=1e-5), name


def on_two_ranks(rank: int, world: int, folder: Path, logp: Tensor) -> dict[str, Any]:
    ranks = MeshRanks(RankMeshes().of(Layout(replicate=2)))
    engine, made = engine_of(folder, 14, ranks), rollout(logp)
    return {case: engine.gradients(made, loss_for(case, made)) for case in CASES}


def test_two_ranks_have_the_gradient_of_one(in_one_piece: Any, tiny_llama_folder: Path) -> None:
    for found in run_ranks(on_two_ranks, 2, tiny_llama_folder, logprobs(tiny_llama_folder)):
        for case in CASES:
            require_close(found[case], in_one_piece[case][0])


@pytest.mark.parametrize("case", CASES)
def test_a_row_that_is_not_counted_has_no_part_in_anything(case: str, batch: Rollout, tiny_llama_folder: Path) -> None:
    flat = batch.advantage.flat.clone()
    flat[batch.advantage.offsets()[4] : batch.advantage.offsets()[5]] = 1e4
    other = batch.adding(advantage=batch.advantage.with_flat(flat))
    engine = engine_of(tiny_llama_folder)
    require_close(engine.gradients(other, loss_for(case, other)), engine.gradients(batch, loss_for(case, batch)), 1e-7)


# ---- where a step starts


@pytest.mark.parametrize("case", CASES)
def test_before_any_update_the_ratio_is_one_at_the_temperature_of_the_rollouts(
    case: str, tiny_llama_folder: Path
) -> None:
    lens = sequences().response_lens
    logp = Ragged(logprobs(tiny_llama_folder), lens)
    start = rollout(logp.flat).adding(old_logp=logp, ref_logp=None)
    plain = {"kl": {"coef": 0.0}, "grpo": {"entropy_coef": 0.0}}
    cfg = config(case, **plain)
    engine = engine_of(tiny_llama_folder)
    stats = engine.evaluate(start, actor_loss(cfg, initial_state(cfg), start, 0))
    assert stats["ratio_mean"].mean == pytest.approx(1.0, abs=1e-5)
    assert stats["approx_kl"].mean == pytest.approx(0.0, abs=1e-6)
    assert stats["clip_fraction"].mean == 0.0
    if case in ("ppo", "gspo", "gspo sequence", "gmpo", "dppo_tv", "dppo_kl"):
        mean = (1.5 - 1.0 + 0.5 - 0.7 + 0.9) / 5
        assert stats["loss"].mean == pytest.approx(-mean, abs=1e-5)
    if case not in COUPLED_POLICY_LOSSES:
        theirs = config("ppo", **plain)
        require_close(
            engine.gradients(start, PolicyLoss(cfg, 0.0)), engine.gradients(start, PolicyLoss(theirs, 0.0)), 1e-5
        )


def test_what_clip_cov_draws_is_keyed_by_seed_step_and_mini_batch(batch: Rollout) -> None:
    cfg = config("clip_cov")
    state = initial_state(cfg)
    first = actor_loss(cfg, state, batch, 0).order(batch)
    assert torch.equal(first, actor_loss(cfg, state, batch, 0).order(batch))
    later = state.after(batch, state.kl)
    others = [
        actor_loss(cfg, state, batch, 1),
        actor_loss(cfg, later, batch, 0),
        actor_loss(cfg.model_copy(update={"seed": 9}), state, batch, 0),
    ]
    assert not any(torch.equal(first, other.order(batch)) for other in others)
    turned = batch.select(torch.tensor([3, 0, 5, 1, 2, 4]))
    assert torch.equal(actor_loss(cfg, state, turned, 0).order(turned), first[[3, 0, 5, 1, 2, 4]])


@pytest.mark.parametrize("algorithm", [grpo, ppo], ids=["grpo", "ppo"])
@pytest.mark.parametrize("kind", ["gspo", "clip_cov"])
def test_a_step_with_another_loss_is_recorded_as_the_same_data_flow(algorithm: Any, kind: str) -> None:
    schema = GRPOConfig if algorithm is grpo else PPOConfig
    base = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"rules": [{"function": "a:b"}]}}
    flows = []
    for name in ("ppo", kind):
        cfg = schema.model_validate({**base, "policy_loss": {"kind": name}, "off_policy": {"old_logprobs": "trainer"}})
        transport = RecordingTransport()
        classes = {"actor": Actor, "reference": Reference, "reward": Reward, "critic": Critic}
        handles = {n: transport.handle(n, classes[n]) for n in algorithm.ROLES}
        Synchronous(algorithm, transport, RoleSet(handles), cfg).step("prompts", algorithm.initial_state(cfg))
        flows.append([(n.role, n.method, n.inputs) for n in transport.nodes])
    assert flows[0] == flows[1]


class Letters:
    """Pays for the share of one token in the response."""

    sources = ()

    def score(self, batch: Rollout) -> Any:
        total = torch.tensor([float((row == 40).float().mean()) for row in batch.sequences.responses().rows()])
        return Scores(total[:, None], total, ("letters",), (1.0,))


def prompts(step: int) -> Prompts:
    return Prompts(((5, 6, 7), (8, 9)), (f"{step}a", f"{step}b"), (None, None), ((), ()), step=step, n=4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_takes_steps_with_every_loss(kind: str, tiny_llama_folder: Path) -> None:
    adaptive = {"entropy_controller": "adaptive", "entropy_target": 9.0, "entropy_step": 0.01}
    sections = {"policy_loss": {"kind": kind, **adaptive}, "grpo": {"epochs": 2, "minibatches": 2}, "kl": {"coef": 0.0}}
    cfg = config("ppo", rollout={"max_new_tokens": 6, "samples_per_prompt": 4, "temperature": TEMPERATURE}, **sections)
    engine = engine_of(tiny_llama_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=6)
    sampler = InProcessRollout(engine.model.model, tokenizer, (2,), params, seed=0, tokens_in_flight=4096)
    actor = Actor(engine, sampler, TEMPERATURE, lambda folder: nullcontext())
    transport = LocalTransport()
    roles = RoleSet(
        {"actor": transport.handle("actor", actor), "reward": transport.handle("reward", Reward(Letters()))}
    )
    before = {name: weight.clone() for name, weight in engine.state()["weights"].items()}
    schedule, state = Synchronous(grpo, transport, roles, cfg), grpo.initial_state(cfg)
    coefs = []
    for step in range(3):
        result = schedule.step(prompts(step), state)
        state, stats = result.state, result.stats
        coefs.append(stats["policy/entropy_coef"].mean)
        assert all(math.isfinite(stat.mean) for stat in stats.values())
        assert stats["mismatch/kl_k3"].mean == pytest.approx(0.0, abs=1e-6), "the trainer samples"
        assert stats["mismatch/ess_token"].mean == pytest.approx(1.0, abs=1e-4)
    assert coefs == pytest.approx([0.0, 0.01, 0.02])
    assert any(float((engine.state()["weights"][name] - weight).abs().max()) > 1e-4 for name, weight in before.items())
    assert grpo.state_from(json.loads(json.dumps(state.state_dict()))) == state, "it is saved as JSON"


# ---- a loss of the user's own


def of_mine(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return -2.0 * advantage_BT * logp_BT * mask_BT


def with_terms(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> PolicyTerms:
    loss = of_mine(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    return policy_terms(loss, logp_BT, old_logp_BT, clipped=mask_BT)


def too_short(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return logp_BT.sum(dim=1)


def test_a_function_of_the_users_own_is_the_loss(batch: Rollout, tiny_llama_folder: Path) -> None:
    engine = engine_of(tiny_llama_folder)
    plain = {"kl": {"coef": 0.0}, "grpo": {"entropy_coef": 0.0}}
    start = batch.adding(ref_logp=None)
    doubled = start.adding(advantage=start.advantage.with_flat(2 * start.advantage.flat))
    reinforce = engine.gradients(doubled, PolicyLoss(config("reinforce", **plain), 0.0))
    for name, clipped in (("of_mine", 0.0), ("with_terms", 1.0)):
        cfg = config("ppo", **plain, policy_loss={"kind": f"{__file__}:{name}"})
        loss = actor_loss(cfg, initial_state(cfg), start, 0)
        require_close(engine.gradients(start, loss), reinforce)
        assert engine.evaluate(start, loss)["clip_fraction"].mean == clipped


def test_names_that_lead_nowhere_are_refused_before_the_first_step(batch: Rollout) -> None:
    with pytest.raises(ConfigError, match=r"'gsppo' is not a policy loss.* Did you mean gspo"):
        policy_loss_function("gsppo")
    with pytest.raises(ConfigError, match="of_min"):
        initial_state(config("ppo", policy_loss={"kind": f"{__file__}:of_min"}))
    with pytest.raises(ConfigError, match="LENS' is a tuple"):
        initial_state(config("ppo", policy_loss={"kind": f"{__file__}:LENS"}))
    wrong = PolicyLoss(config("ppo", policy_loss={"kind": f"{__file__}:too_short"}), 0.0)
    with pytest.raises(ShapeError, match=r"too_short returned a loss of shape \(6,\)"):
        wrong.items(Outputs(logp=batch.old_logp.flat, entropy=torch.zeros_like(batch.old_logp.flat)), batch)


# ---- adaptive entropy


def test_the_entropy_coefficient_follows_the_entropy_of_the_rollouts(batch: Rollout) -> None:
    adaptive = {"kind": "ppo", "entropy_controller": "adaptive", "entropy_step": 0.01}
    mask = batch.sequences.trained.flat
    entropy = -float(batch.rollout_logp.flat[mask].mean())
    out = Outputs(logp=batch.old_logp.flat, entropy=torch.full_like(batch.old_logp.flat, 1.5))
    for target, below in ((entropy + 0.1, True), (entropy - 0.1, False)):
        cfg = config("ppo", policy_loss={**adaptive, "entropy_target": target}, kl={"coef": 0.0})
        first = initial_state(cfg)
        assert first.entropy == AdaptiveEntropy(0.05, target, 0.01, 1.0)
        state = first.after(batch, first.kl)
        assert state.step == 1
        assert state.entropy.coef == pytest.approx(0.06 if below else 0.0)
        assert state_from(state.state_dict()) == state
        start = batch.adding(ref_logp=None)
        with_bonus, stats = actor_loss(cfg, state, start, 0).items(out, start)
        without, _ = actor_loss(cfg, first, start, 0).items(out, start)
        assert (without - with_bonus).tolist() == pytest.approx([1.5 * state.entropy.coef] * len(mask), abs=1e-6)
        assert stats["entropy_coef"].mean == pytest.approx(state.entropy.coef)
    fixed = config("ppo", kl={"coef": 0.0})
    assert initial_state(fixed).entropy is None
    assert "entropy" not in initial_state(fixed).state_dict()


@pytest.mark.parametrize("algorithm", [grpo, ppo], ids=["grpo", "ppo"])
def test_each_step_moves_the_entropy_control(algorithm: Any, batch: Rollout) -> None:
    sections = {"policy_loss": {"entropy_controller": "adaptive", "entropy_target": 50.0}}
    base = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"rules": [{"function": "a:b"}]}, **sections}
    cfg = (GRPOConfig if algorithm is grpo else PPOConfig).model_validate(base)
    total = torch.arange(6.0)
    values = Ragged(torch.zeros(int((batch.sequences.response_lens + 1).sum())), batch.sequences.response_lens + 1)
    scored = batch.adding(score=Scores(total[:, None], total, ("r",)), value=values)
    _, state, _ = algorithm.advantages(scored, algorithm.initial_state(cfg), cfg)
    assert state.entropy.below
    assert state.entropy.level == pytest.approx(0.005)


# ---- correction for the sampler


def test_the_mismatch_is_reported_wherever_both_logprobs_are_known(batch: Rollout) -> None:
    mask, ones = (
        batch.sequences.trained.padded(),
        torch.ones_like(batch.sequences.trained.padded(), dtype=torch.float32),
    )
    gap = [
        [o - r for o, r, m in zip(a, b, c, strict=True) if m]
        for a, b, c in zip(
            *(x.padded().tolist() for x in (batch.old_logp, batch.rollout_logp)), mask.tolist(), strict=True
        )
    ]
    every = [d for row in gap for d in row]
    rho = [math.exp(d) for d in every]
    of_rows = [math.exp(sum(row)) for row in gap]
    signal, stats = corrected(ones, batch, config("ppo"))
    assert torch.equal(signal, ones)
    wanted = {
        "kl_k1": -sum(every) / len(every),
        "kl_k3": sum(r - 1 - d for r, d in zip(rho, every, strict=True)) / len(every),
        "perplexity_ratio": sum(math.exp(-sum(row) / len(row)) for row in gap) / len(gap),
        "ratio_min": min(rho),
        "ratio_max": max(rho),
        "chi2_token": sum(r * r for r in rho) / len(rho) - 1,
        "chi2_sequence": sum(r * r for r in of_rows) / len(of_rows) - 1,
        "ess_token": sum(rho) ** 2 / (len(rho) * sum(r * r for r in rho)),
        "ess_sequence": sum(of_rows) ** 2 / (len(of_rows) * sum(r * r for r in of_rows)),
    }
    assert {n.removeprefix("mismatch/") for n in stats} == set(wanted)
    for name, value in wanted.items():
        assert stats[f"mismatch/{name}"].mean == pytest.approx(value, rel=1e-4, abs=1e-6), name
    _, theirs = corrected(ones, batch, config("ppo", off_policy={"old_logprobs": "rollout"}))
    assert theirs == {}


def test_every_setting_of_the_correction_reaches_the_signal(batch: Rollout) -> None:
    mask = batch.sequences.trained.padded()
    ones = mask.float()
    token = {"correction": "token_truncated", "cap": 1.2}
    plain, stats = corrected(ones, batch, config("ppo", off_policy=token))
    assert stats["off_policy/truncated_fraction"].mean == pytest.approx(float((plain[mask] == 1.2).float().mean()))
    assert stats["off_policy/weight_mean"].mean == pytest.approx(float(plain[mask].mean()))
    assert 0 < stats["off_policy/effective_sample_size"].mean < 1
    for change, name in (({"floor": 0.9}, "floored_fraction"), ({"veto": 0.6}, "vetoed_fraction")):
        other, found = corrected(ones, batch, config("ppo", off_policy={**token, **change}))
        assert not torch.equal(other, plain)
        assert stats[f"off_policy/{name}"].mean == 0
        assert found[f"off_policy/{name}"].mean > 0
    one, found = corrected(ones, batch, config("ppo", off_policy={**token, "normalize": True}))
    assert float(one[mask].mean()) == pytest.approx(1.0)
    assert found["off_policy/weight_mean"].mean == pytest.approx(1.0)
    vetoed, _ = corrected(ones, batch, config("ppo", off_policy={"veto": 0.6}))
    assert set(vetoed[mask].tolist()) == {0.0, 1.0}
