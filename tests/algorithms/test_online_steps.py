"""Whole steps of online DPO, XPO and Nash-MD on a tiny model, and gradients that no cut of the work can change."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from spmd_kit import run_ranks
from transformers import AutoTokenizer

from tutelage.algorithms import nash_md, online_dpo, xpo
from tutelage.algorithms.judged import JudgedPairs
from tutelage.config import NashMDConfig, OnlineDPOConfig, XPOConfig
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.engines.following import FollowingWeights
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import MeshRanks
from tutelage.layout import Layout
from tutelage.models.load import load_causal_lm
from tutelage.models.lora import adapter_off
from tutelage.roles.actor import Actor
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.inprocess.mixture import GeometricMixture
from tutelage.rollout.sampling import SamplingParams
from tutelage.schedules import BoundedAsync, OneStepOff, Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Pairs, Prompts, Ragged, Rollout, Scores, Sequences

ALGORITHMS = {"online_dpo": online_dpo, "xpo": xpo, "nash_md": nash_md}
SCHEMAS = {"online_dpo": OnlineDPOConfig, "xpo": XPOConfig, "nash_md": NashMDConfig}
SAMPLES = {"online_dpo": 4, "xpo": 2, "nash_md": 2}


def config(name: str, **settings: Any) -> Any:
    base = {"algorithm": name, "model": {"path": "m"}, "data": {"train": "d"}, name: settings}
    return SCHEMAS[name].model_validate({**base, "rollout": {"max_new_tokens": 6, "samples_per_prompt": SAMPLES[name]}})


class Letters:
    """Pays for the share of some tokens in the response, each a little differently."""

    sources = ()

    def score(self, batch: Rollout) -> Any:
        rows = batch.sequences.responses().rows()
        total = torch.tensor([float((row % 7).float().mean()) for row in rows])
        return Scores(total[:, None], total, ("letters",))


def sampler(model: Any, tokenizer: Any, context: Any = nullcontext) -> InProcessRollout:
    params = SamplingParams(temperature=1.0, max_new_tokens=6)
    return InProcessRollout(model, tokenizer, (2,), params, seed=0, tokens_in_flight=4096, forward_context=context)


def tiny(name: str, folder: Any, lora_rank: int = 0, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """The settings and the roles of one algorithm on the tiny Llama, as a run wires them."""
    policy = load_causal_lm(ModelConfig(path=str(folder), lora_rank=lora_rank))
    engine = ModelEngine(policy, OptimConfig(lr=3e-3, schedule="constant"))
    reference = engine if lora_rank else engine.snapshot()
    off = partial(adapter_off, policy.adapted) if lora_rank else nullcontext
    cfg, tokenizer = config(name, **settings), AutoTokenizer.from_pretrained(folder)
    other, context = reference.model.model, off
    if name == "nash_md":
        other, context = GeometricMixture(policy.model, other, cfg.nash_md.mixture_coef, off), nullcontext
    moves = name == "online_dpo" and cfg.online_dpo.reference_every
    objects = {
        "actor": Actor(engine, sampler(policy.model, tokenizer), 1.0, lambda folder: nullcontext()),
        "reference": Reference(
            reference,
            1.0,
            adapter=not lora_rank,
            rollout=None if name == "online_dpo" else sampler(other, tokenizer, context),
            following=FollowingWeights(reference) if moves else None,
        ),
        "reward": Reward(Letters()),
    }
    return cfg, objects


def prompts_of(step: int, n: int) -> Prompts:
    return Prompts(((5, 6, 7), (8, 9)), (f"{step}a", f"{step}b"), (None, None), ((), ()), step=step, n=n)


def trained(
    name: str, made: Callable[..., Any], cfg: Any, objects: dict[str, Any], steps: int = 4
) -> list[dict[str, float]]:
    """Statistics of each step."""
    transport = LocalTransport()
    roles = RoleSet({role: transport.handle(role, thing) for role, thing in objects.items()})
    schedule, algorithm = made(ALGORITHMS[name], transport, roles, cfg), ALGORITHMS[name]
    state, taken, found = algorithm.initial_state(cfg), iter(range(steps)), []
    draw = lambda: next((prompts_of(step, SAMPLES[name]) for step in taken), None)  # noqa: E731
    while (result := schedule.advance(draw, state)) is not None:
        found.append({key: stat.mean for key, stat in result.stats.items()})
        state = result.state
    assert len(found) == steps
    return found


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_policy_starts_as_its_reference_and_learns(name: str, lora_rank: int, tiny_llama_folder: Any) -> None:
    cfg, objects = tiny(name, tiny_llama_folder, lora_rank)
    found = trained(name, Synchronous, cfg, objects)
    assert found[0]["kl/sequence"] == pytest.approx(0.0, abs=1e-5)
    assert found[-1]["kl/sequence"] != 0.0
    if name == "online_dpo":
        assert found[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    if name == "xpo":
        assert found[0]["dpo/preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    if name == "nash_md":
        assert found[0]["policy/log_ratio"] == pytest.approx(0.0, abs=1e-5)
        assert found[0]["policy/entropy"] > 0
    else:
        assert found[0]["dpo/margin"] == pytest.approx(0.0, abs=1e-6)
    assert 0 <= found[0]["preference/tied_fraction"] < 1


@pytest.mark.parametrize(
    ("name", "kind", "ages"),
    [
        ("online_dpo", "one step off", [0, 1, 1, 1]),
        ("online_dpo", "asynchronous", [0, 1, 2, 2]),
        ("xpo", "one step off", [0, 1, 1, 1]),
    ],
)
def test_pairs_may_be_older_than_the_policy_they_train(
    name: str, kind: str, ages: list[int], tiny_llama_folder: Any
) -> None:
    cfg, objects = tiny(name, tiny_llama_folder)
    made = OneStepOff if kind == "one step off" else partial(BoundedAsync, max_staleness=2)
    found = trained(name, made, cfg, objects)
    assert [stats["schedule/staleness_max"] for stats in found] == ages


def test_the_other_side_of_xpo_is_the_reference_and_stays_it(tiny_llama_folder: Any) -> None:
    """Training moves the policy's answers and not the reference's, with weights of its own and with an adapter off."""
    for lora_rank in (0, 4):
        cfg, objects = tiny("xpo", tiny_llama_folder, lora_rank)
        prompts = prompts_of(9, 4)
        own, rival = objects["actor"].generate(prompts), objects["reference"].generate(prompts)
        assert own.sequences.response_rows() == rival.sequences.response_rows(), "the same keys and weights"
        trained("xpo", Synchronous, cfg, objects)
        again = objects["reference"].generate(prompts)
        assert again.sequences.response_rows() == rival.sequences.response_rows()
        assert torch.equal(again.rollout_logp.flat, rival.rollout_logp.flat)
        assert float((objects["actor"].logprobs(own).flat - own.rollout_logp.flat).abs().max()) > 1e-4
        found = objects["reference"].logprobs(again)
        torch.testing.assert_close(found.flat, again.rollout_logp.flat, atol=1e-5, rtol=0)


def test_the_mixture_of_nash_md_follows_the_policy(tiny_llama_folder: Any) -> None:
    """Its logprobs lie between those of the present policy and the reference, normalised: checked on one prefix."""
    cfg, objects = tiny("nash_md", tiny_llama_folder, mixture_coef=0.25)
    trained("nash_md", Synchronous, cfg, objects)
    rollout = objects["reference"].generate(prompts_of(9, 4))
    engines = [objects[role].engine for role in ("actor", "reference")]
    tokens = len(objects["actor"].rollout.tokenizer)
    every = Sequences.build([[5, 6, 7]] * tokens, [[token] for token in range(tokens)])
    own, ref = (engine.logprobs(every, 1.0).flat.double() for engine in engines)
    assert float((own - ref).abs().max()) > 1e-3, "the policy has moved"
    assert float(own.exp().sum()) == pytest.approx(1.0, abs=1e-4), "every token there is"
    mixed = torch.log_softmax(0.75 * own + 0.25 * ref, -1)
    for row, logp in list(zip(rollout.sequences.response_rows(), rollout.rollout_logp.rows(), strict=True))[:4]:
        assert float(logp[0]) == pytest.approx(float(mixed[row[0]]), abs=1e-5)


def test_the_reference_becomes_the_policy_every_few_steps(tiny_llama_folder: Any) -> None:
    cfg, objects = tiny("online_dpo", tiny_llama_folder, reference_every=2, minibatches=2)
    found = trained("online_dpo", Synchronous, cfg, objects, steps=5)
    assert [("dpo/reference_moved" in stats) for stats in found] == [False, True, False, True, False]
    assert found[1]["kl/sequence"] != pytest.approx(0.0, abs=1e-6)
    assert found[2]["kl/sequence"] == pytest.approx(0.0, abs=1e-5), "a round starts where its reference is"
    assert found[3]["kl/sequence"] != pytest.approx(0.0, abs=1e-6)
    assert found[4]["kl/sequence"] == pytest.approx(0.0, abs=1e-5)


def test_recording_finds_the_data_flow() -> None:
    def calls(name: str, **settings: Any) -> list[tuple[str, str, tuple[int, ...]]]:
        transport = RecordingTransport()
        classes = {"actor": Actor, "reference": Reference, "reward": Reward}
        roles = RoleSet({role: transport.handle(role, cls) for role, cls in classes.items()})
        algorithm, cfg = ALGORITHMS[name], config(name, **settings)
        collected = algorithm.collect(transport.put("prompts"), roles, cfg)
        transport.call(algorithm.advantages, collected, algorithm.initial_state(cfg), cfg, outputs=3)
        return [(n.role, n.method, n.inputs) for n in transport.nodes]

    assert calls("online_dpo") == [
        ("actor", "generate", ()),
        ("reference", "logprobs", (0,)),
        ("reward", "score", (0,)),
        ("controller", "advantages", (0, 1, 2)),
    ]
    for name in ("xpo", "nash_md"):
        assert calls(name) == [
            ("actor", "generate", ()),
            ("reference", "generate", ()),  # neither waits for the other
            ("reference", "beside", (0, 1)),
            ("reference", "logprobs", (2,)),
            ("reward", "score", (2,)),
            ("controller", "advantages", (2, 3, 4)),
        ]


# ---- invariance ----


def require_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rel: float) -> None:
    """|difference| <= rel |theirs| over all weights together."""
    assert ours.keys() == theirs.keys()
    size = sum(float(w.double().square().sum()) for w in theirs.values()) ** 0.5
    apart = sum(float((ours[n] - w).double().square().sum()) for n, w in theirs.items()) ** 0.5
    assert size > 0
    assert apart <= rel * size, apart / size


LENS = ((3, 4), (1, 6), (2, 1), (2, 5), (5, 2), (4, 4))


def batch_of(name: str) -> Any:
    """A scored mini-batch of six items with a reference that is not the policy; one of them does not count."""
    generator = torch.Generator().manual_seed(3)

    def sequences(lens: tuple[tuple[int, int], ...]) -> Sequences:
        rows = [torch.randint(0, 90, (p + r,), generator=generator).tolist() for p, r in lens]
        cuts = [(row[:p], row[p:]) for row, (p, _) in zip(rows, lens, strict=True)]
        return Sequences.build([prompt for prompt, _ in cuts], [response for _, response in cuts])

    def column(lens: torch.Tensor) -> Ragged:
        return Ragged(-5 * torch.rand(int(lens.sum()), generator=generator), lens)

    own, other = sequences(LENS), sequences(LENS[::-1])
    if name == "nash_md":
        six = torch.zeros(6, dtype=torch.int64)
        lens = own.response_lens
        chances = torch.repeat_interleave(torch.rand(6, generator=generator) - 0.5, lens)
        return Rollout(
            own, column(lens), six == 0, tuple("abcdef"), six, six, (None,) * 6, ((),) * 6, ("",) * 6, six,
            ref_logp=column(lens), advantage=Ragged(chances, lens), counted=torch.arange(6) != 4,
        )  # fmt: skip
    margin = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 1.0])
    pairs = Pairs(own, other, margin, tuple("abcdef"), column(own.response_lens), column(other.response_lens))
    by_reference = torch.tensor([True, False, False, False, True, True])
    scored = torch.ones(6, dtype=torch.bool)
    return JudgedPairs(pairs, by_reference, torch.zeros(6, 2, dtype=torch.int64), scored)


def loss_of(name: str) -> Any:
    settings = {"online_dpo": {"beta": 0.1}, "xpo": {"beta": 0.1, "alpha": 0.05}, "nash_md": {"beta": 0.4}}[name]
    cfg = config(name, **settings)
    return {"online_dpo": online_dpo.PairLoss, "xpo": xpo.XPOLoss, "nash_md": nash_md.NashMDLoss}[name].of(cfg)


def engine_of(folder: Any, **more: Any) -> ModelEngine:
    return ModelEngine(load_causal_lm(ModelConfig(path=str(folder))), OptimConfig(lr=1e-3, schedule="constant"), **more)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_neither_micro_batches_nor_order_change_loss_or_gradient(name: str, tiny_llama_folder: Any) -> None:
    batch, loss = batch_of(name), loss_of(name)
    whole = engine_of(tiny_llama_folder, tokens_per_micro_batch=1000)
    wanted, value = whole.gradients(batch, loss), whole.evaluate(batch, loss)
    cut = engine_of(tiny_llama_folder, tokens_per_micro_batch=1)
    require_close(cut.gradients(batch, loss), wanted, 1e-5)
    mixed = batch.select(torch.tensor([4, 2, 0, 5, 1, 3]))
    require_close(whole.gradients(mixed, loss), wanted, 1e-5)
    for other in (cut.evaluate(batch, loss), whole.evaluate(mixed, loss)):
        assert other.keys() == value.keys()
        for key in value:
            assert other[key].mean == pytest.approx(value[key].mean, rel=1e-4, abs=1e-5), key


def on_a_rank(rank: int, world: int, folder: str) -> Any:
    ranks = MeshRanks(RankMeshes().of(Layout(replicate=world), "cpu"), offload=False)
    engine, found = engine_of(folder, ranks=ranks), {}
    for name in ALGORITHMS:
        batch, loss = batch_of(name), loss_of(name)
        found[name] = engine.gradients(batch, loss), engine.evaluate(batch, loss)["loss"].mean
    return found


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(tiny_llama_folder: Any) -> None:
    alone, every = engine_of(tiny_llama_folder), run_ranks(on_a_rank, 2, str(tiny_llama_folder))
    for name in ALGORITHMS:
        batch, loss = batch_of(name), loss_of(name)
        wanted, value = alone.gradients(batch, loss), alone.evaluate(batch, loss)["loss"].mean
        for found in every:
            require_close(found[name][0], wanted, 1e-5)
            assert found[name][1] == pytest.approx(value, rel=1e-5)
