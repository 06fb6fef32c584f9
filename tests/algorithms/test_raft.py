"""The RAFT file against plain Python, through an engine, and whole steps of a tiny model."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tutelage.algorithms import raft
from tutelage.algorithms.raft import KeptLoss
from tutelage.config import RAFTConfig, load_checked
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ConfigError, ShapeError
from tutelage.math.rejection import duplicates, kept_responses
from tutelage.models.load import load_causal_lm
from tutelage.roles.actor import Actor
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.schedules import Synchronous
from tutelage.sharing import shares
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Outputs, Prompts, Ragged, Rollout, Scores, Sequences

SCORES = [1.0, 4.0, 4.0, 2.0, 9.0, 0.5]
GROUPS = [0, 0, 0, 1, 1, 2]
RESPONSES = [[7, 8], [7], [7], [5, 5, 5], [6, 9], [3]]


def config(**sections: Any) -> RAFTConfig:
    base = {"model": {"path": "m"}, "data": {"train": "d"}, "rollout": {"max_new_tokens": 6, "samples_per_prompt": 4}}
    return RAFTConfig.model_validate({**base, **sections})


def rollout(**columns: Any) -> Rollout:
    total, seqs = torch.tensor(SCORES), Sequences.build([[1]] * 6, RESPONSES)
    whole = Rollout(
        sequences=seqs,
        rollout_logp=Ragged(torch.full((10,), -1.0), seqs.response_lens),
        finished=torch.tensor([True, False, True, True, True, True]),
        prompt_ids=("a", "a", "a", "b", "b", "c"),
        samples=torch.tensor([0, 1, 2, 0, 1, 0]),
        group=torch.tensor(GROUPS),
        truths=(None,) * 6,
        messages=((),) * 6,
        texts=("",) * 6,
        weights_version=torch.zeros(6, dtype=torch.int64),
        score=Scores(total[:, None], total, ("model",), (1.0,)),
    )
    return whole.adding(**columns)


def step(cfg: RAFTConfig, batch: Rollout) -> tuple[list[str], list[bool], dict[str, float]]:
    """(prompt/sample of what is left, whether each counts, statistics)."""
    left, state, stats = raft.advantages(batch, raft.initial_state(cfg), cfg)
    assert state.step == 1
    assert left.counted is not None
    names = [f"{p}{s}" for p, s in zip(left.prompt_ids, left.samples.tolist(), strict=True)]
    return names, left.counted.tolist(), {name: stat.mean for name, stat in stats.items()}


# ---- what is kept ----


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"keep": "best"}, ["a1", "b1", "c0"]),
        ({"keep": "top_k", "top_k": 2}, ["a1", "a2", "b0", "b1", "c0"]),
        ({"keep": "threshold", "threshold": 2.0}, ["a1", "a2", "b0", "b1"]),
        ({"keep": "best", "missing_eos_penalty": 0.5}, ["a2", "b1", "c0"]),
    ],
)
def test_what_is_kept_by_hand(settings: dict[str, Any], expected: list[str]) -> None:
    names, counted, _ = step(config(raft=settings), rollout())
    assert names == expected
    assert all(counted)


def test_against_sorting_in_plain_python() -> None:
    source = random.Random(3)
    for _ in range(30):
        size = source.randrange(1, 25)
        score = [source.randrange(5) / 2 for _ in range(size)]
        group, valid = [source.randrange(6) for _ in range(size)], [source.random() < 0.8 for _ in range(size)]
        tensors = torch.tensor(score), torch.tensor(group), torch.tensor(valid)
        for count in (1, 2, 3):
            expected = set()
            for prompt in set(group):
                rows = [i for i in range(size) if group[i] == prompt and valid[i]]
                expected |= set(sorted(rows, key=lambda i, score=score: (-score[i], i))[:count])
            found = kept_responses(*tensors, "top_k", top_k=count)
            assert set(torch.nonzero(found).squeeze(1).tolist()) == expected
        assert torch.equal(kept_responses(*tensors, "best"), kept_responses(*tensors, "top_k", top_k=1))
        over = [i for i in range(size) if valid[i] and score[i] >= 1.0]
        assert torch.nonzero(kept_responses(*tensors, "threshold", threshold=1.0)).squeeze(1).tolist() == over


def test_a_response_without_a_score_is_never_kept_and_its_number_never_read() -> None:
    total = torch.tensor([1.0, float("nan"), 4.0, 2.0, float("inf"), float("nan")])
    errors = ("", "failed", "", "", "failed", "failed")
    score = Scores(total[:, None], total, ("model",), (1.0,), errors)
    names, _, stats = step(config(), rollout(score=score))
    assert names == ["a2", "b0"]
    assert stats["raft/kept_fraction"] == pytest.approx(2 / 3)
    assert stats["raft/score_all"] == pytest.approx(7 / 3)
    assert stats["raft/prompts_kept_fraction"] == pytest.approx(2 / 3)


def test_no_two_ways_to_keep_are_aliases() -> None:
    ways = [{"keep": "best"}, {"keep": "top_k"}, {"keep": "threshold", "threshold": 3.0}]
    found = [step(config(raft=settings), rollout())[2]["raft/score_kept"] for settings in ways]
    for one, other in itertools.combinations(found, 2):
        assert abs(one - other) > 1e-3


def test_statistics_of_what_was_kept_against_all() -> None:
    _, _, stats = step(config(raft={"keep": "top_k", "top_k": 2}), rollout())
    assert stats["raft/score_kept"] == pytest.approx((4 + 4 + 2 + 9 + 0.5) / 5)
    assert stats["raft/score_all"] == stats["reward/score_mean"] == pytest.approx(20.5 / 6)
    assert stats["raft/kept_fraction"] == pytest.approx(5 / 6)
    assert stats["raft/duplicate_fraction"] == pytest.approx(1 / 5), "a2 repeats a1"
    assert stats["raft/length_kept"] == pytest.approx((1 + 1 + 3 + 2 + 1) / 5)
    assert stats["rollout/length_mean"] == pytest.approx(10 / 6)


def test_the_same_tokens_for_another_prompt_are_no_duplicate() -> None:
    assert duplicates([[1, 2], [1, 2], [1, 2], [1]], [0, 0, 1, 0], [True] * 4) == [False, True, False, False]
    assert duplicates([[1, 2], [1, 2]], [0, 0], [False, True]) == [False, False]


def test_kl_to_the_reference_is_paid_before_the_best_are_chosen() -> None:
    """a1 and a2 score alike; a1 is 3 nats from the reference, so a2 is kept, and b1 falls behind b0."""
    lens = torch.tensor([2, 1, 1, 3, 2, 1])
    old = Ragged(torch.tensor([-1.0, -1, -1, -2, -1, -1, -1, -1, -1, -1]), lens)
    ref = Ragged(torch.tensor([-1.0, -1, -4, -2, -1, -1, -1, -5, -6, -1]), lens)
    names, _, stats = step(config(kl={"coef": 1.0}), rollout(old_logp=old, ref_logp=ref))
    assert names == ["a2", "b0", "c0"]
    assert stats["kl/sequence"] == pytest.approx((3 + 9) / 6)
    assert stats["raft/score_kept"] == pytest.approx((4 + 2 + 0.5) / 3)
    assert raft.roles_needed(config(kl={"coef": 1.0})) == ("actor", "reference", "reward")
    assert raft.roles_needed(config()) == ("actor", "reward")


def test_fewer_kept_than_mini_batches_are_filled_up_with_rows_that_weigh_nothing() -> None:
    cfg = config(raft={"keep": "threshold", "threshold": 5.0, "minibatches": 3})
    left, _, stats = raft.advantages(rollout(), raft.initial_state(cfg), cfg)
    assert len(left) == 3
    assert left.counted is not None
    assert left.counted.sum() == 1
    weights = KeptLoss(cfg).weights(left)
    assert float(weights.flat.sum()) == pytest.approx(1.0)
    assert all(float(row.sum()) == 0 for row, kept in zip(weights.rows(), left.counted, strict=True) if not kept)
    nothing = config(raft={"keep": "threshold", "threshold": 99.0})
    left, _, stats = raft.advantages(rollout(), raft.initial_state(nothing), nothing)
    assert len(left) == 1
    assert float(KeptLoss(nothing).weights(left).flat.abs().sum()) == 0.0
    assert stats["raft/kept_fraction"].mean == 0.0


# ---- the loss ----


def test_the_loss_is_the_mean_nll_of_counted_trained_tokens() -> None:
    cfg = config()
    seqs = Sequences.build([[1]] * 3, [[2, 3], [4], [5, 6]], [[True, False], [True], [True, True]])
    batch = rollout().select(torch.arange(3)).adding(sequences=seqs, counted=torch.tensor([True, True, False]))
    logp = torch.tensor([-1.0, float("nan"), -3.0, float("inf"), -9.0], requires_grad=True)
    items, stats = KeptLoss(cfg).items(Outputs(logp=logp), batch)
    loss = (items * KeptLoss(cfg).weights(batch).flat).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2.0)
    assert stats["nll"].mean == pytest.approx(2.0)
    assert logp.grad is not None
    assert logp.grad.tolist() == [-0.5, 0.0, -0.5, 0.0, 0.0]


def exact_engine(folder: Path, budget: int) -> ModelEngine:
    """In float64, so that what is left of a difference is not rounding."""
    model = load_causal_lm(ModelConfig(path=str(folder)))
    model.model.double()
    return ModelEngine(model, OptimConfig(lr=1e-3), tokens_per_micro_batch=budget)


def test_loss_and_gradient_do_not_depend_on_how_the_work_is_cut(tiny_llama_folder: Path) -> None:
    cfg = config()
    left, _, _ = raft.advantages(rollout(), raft.initial_state(cfg), cfg)
    left = Rollout.concat([left, rollout().select(torch.tensor([0])).adding(counted=torch.tensor([False]))])
    loss, engines = KeptLoss(cfg), [exact_engine(tiny_llama_folder, budget) for budget in (999, 1)]
    whole, cut = (engine.gradients(left, loss) for engine in engines)
    turned = engines[0].gradients(left.select(torch.tensor([3, 1, 0, 2])), loss)
    parts = [engines[0].gradients(share, loss) for share in shares(left, loss, 2)]
    for name, expected in whole.items():
        for found in (cut[name], turned[name], parts[0][name] + parts[1][name]):
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


# ---- whole steps ----


class Letters:
    """Pays for the share of the first half of the vocabulary in the response."""

    sources = ()

    def score(self, batch: Rollout) -> Scores:
        rows = batch.sequences.responses().rows()
        total = torch.tensor([float((row < 56).float().mean()) for row in rows])
        return Scores(total[:, None], total, ("letters",), (1.0,))


def test_recording_finds_the_data_flow_with_and_without_a_reference() -> None:
    others = [("actor", "logprobs", (0,)), ("reference", "logprobs", (0,))]
    for coef, further in ((0.0, []), (0.1, others)):
        cfg, transport = config(kl={"coef": coef}, raft={"epochs": 2, "minibatches": 2}), RecordingTransport()
        classes = {"actor": Actor, "reference": Reference, "reward": Reward}
        roles = RoleSet({n: transport.handle(n, classes[n]) for n in raft.roles_needed(cfg)})
        Synchronous(raft, transport, roles, cfg).step("prompts", raft.initial_state(cfg))
        calls = [(n.role, n.method, n.inputs) for n in transport.nodes]
        assert calls[: 2 + len(further)] == [("actor", "generate", ()), ("reward", "score", (0,)), *further]
        assert [c[:2] for c in calls[2 + len(further) :]] == [
            ("controller", "advantages"),
            *[("actor", "step")] * 4,
            ("actor", "publish"),
            ("controller", "merged_by_role"),
        ]


def test_the_policy_learns_what_is_paid(tiny_llama_folder: Path) -> None:
    cfg = config(rollout={"max_new_tokens": 6, "samples_per_prompt": 8})
    policy = load_causal_lm(ModelConfig(path=str(tiny_llama_folder)))
    engine = ModelEngine(policy, OptimConfig(lr=3e-3, schedule="constant"))
    params = SamplingParams(temperature=1.0, max_new_tokens=6)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    sampler = InProcessRollout(policy.model, tokenizer, (2,), params, seed=0, tokens_in_flight=4096)
    transport = LocalTransport()
    objects = {"actor": Actor(engine, sampler, 1.0, lambda folder: nullcontext()), "reward": Reward(Letters())}
    roles = RoleSet({name: transport.handle(name, role) for name, role in objects.items()})
    schedule, state, results = Synchronous(raft, transport, roles, cfg), raft.initial_state(cfg), []
    for number in range(12):
        prompts = Prompts(((5, 6), (8, 9)), (f"{number}a", f"{number}b"), (None,) * 2, ((),) * 2, step=number, n=8)
        result = schedule.step(prompts, state)
        state = result.state
        results.append(result.stats)
    first, last = results[0], results[-1]
    assert first["raft/score_kept"].mean > first["raft/score_all"].mean
    assert last["reward/score_mean"].mean > first["reward/score_mean"].mean + 0.2
    assert first["raft/kept_fraction"].mean == pytest.approx(1 / 8)
    assert len(result.batch) == 2


# ---- recipes ----


def test_keys_without_effect_and_recipes_that_cannot_work_are_refused() -> None:
    cases = {
        ("raft.top_k=3",): "raft.top_k has no effect",
        ("raft.threshold=1.0",): "raft.threshold has no effect",
        ("rollout.samples_per_prompt=1",): "the best of one response is every response",
        ("raft.keep=top_k", "raft.top_k=8"): "every response would be kept",
        ("raft.minibatches=100",): "fewer than raft.minibatches 100",
        ("reward.model=null",): "nothing is rewarded",
    }
    for overrides, text in cases.items():
        with pytest.raises(ConfigError, match=text):
            load_checked("demo_raft", list(overrides))
    loaded, _ = load_checked("demo_raft", ["raft.keep=threshold", "rollout.samples_per_prompt=1"])
    assert "reference" in raft.roles_needed(loaded.config)


def test_wrong_arguments_are_refused() -> None:
    three = torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ConfigError, match="'bets' is not a way to keep"):
        kept_responses(*three, "bets")
    with pytest.raises(ConfigError, match="top_k is 0"):
        kept_responses(*three, "top_k", top_k=0)
    with pytest.raises(ShapeError):
        kept_responses(three[0], three[1][:2], three[2], "best")
    none = torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    assert kept_responses(*none, "best").shape == (0,)
