"""The DPO file against sums worked out in plain Python, and updates of a tiny model."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tutelage.algorithms import dpo
from tutelage.algorithms.preference import preference_loss
from tutelage.config import DPOConfig
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ShapeError
from tutelage.models.load import load_causal_lm
from tutelage.roles.learner import Learner
from tutelage.roles.reference import Reference
from tutelage.schedules import Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Outputs, Pairs, Ragged, Sequences

CHOSEN, REJECTED = [[11, 12, 13], [14]], [[21], [22, 23]]
LOGP = [-1.0, -2.0, -0.5, -3.0, -0.9, -1.1, -9.0]  # chosen 3 + 1, rejected 1 + 2
REF = [-1.5, -1.0, -0.5, -2.0, -0.2, -1.6, -50.0]


def config(**settings: Any) -> DPOConfig:
    return DPOConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "dpo": settings})


def loss_of(**settings: Any) -> Any:
    return preference_loss(config(**settings).dpo)


def pairs() -> Pairs:
    """Two pairs; the last token of the second rejected answer is not trained."""
    chosen = Sequences.build([[1], [2, 3]], CHOSEN)
    rejected = Sequences.build([[1], [2, 3]], REJECTED, [[True], [True, False]])
    return Pairs(chosen, rejected, torch.zeros(2), ("a", "b"))


def with_reference(batch: Pairs) -> Pairs:
    return batch.adding(ref_logp=Ragged(torch.tensor(REF), batch.sequences.response_lens))


def test_the_reference_column_keeps_to_its_pair_when_pairs_are_cut_and_joined() -> None:
    batch = with_reference(pairs())
    assert [row.tolist() for row in batch.ref_chosen_logp.rows()] == [pytest.approx(REF[:3]), pytest.approx(REF[3:4])]
    assert [row.tolist() for row in batch.ref_rejected_logp.rows()] == [pytest.approx(REF[4:5]), pytest.approx(REF[5:])]
    second, first = batch.select(torch.tensor([1])), batch.select(torch.tensor([0]))
    assert second.ref_rejected_logp.flat.tolist() == pytest.approx(REF[5:])
    assert Pairs.concat([first, second]).ref_chosen_logp.flat.tolist() == pytest.approx(REF[:4])
    with pytest.raises(ShapeError, match="does not fit 2 items"):
        pairs().adding(ref_logp=Ragged(torch.zeros(4), torch.tensor([3, 1])))
    with pytest.raises(TypeError):
        pairs().adding(reference=None)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_sums_over_trained_tokens(smoothing: float) -> None:
    loss = loss_of(beta=0.5, label_smoothing=smoothing)
    batch = with_reference(pairs())
    items, stats = loss.items(Outputs(logp=torch.tensor(LOGP)), batch)
    gaps = [a - b for a, b in zip(LOGP, REF, strict=True)]
    rewards = [[0.5 * sum(gaps[:3]), 0.5 * gaps[3]], [0.5 * gaps[4], 0.5 * gaps[5]]]  # the hole, gaps[6], is not read
    wanted = []
    for c, r in zip(*rewards, strict=True):
        p = 1 / (1 + math.exp(r - c))
        wanted.append(-(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p))
    assert items.tolist() == pytest.approx(wanted, rel=1e-5)
    assert loss.weights(batch).flat.tolist() == [0.5, 0.5]
    assert stats["reward_chosen"].mean == pytest.approx(sum(rewards[0]) / 2)
    assert stats["reward_rejected"].mean == pytest.approx(sum(rewards[1]) / 2)
    assert stats["margin"].mean == pytest.approx((sum(rewards[0]) - sum(rewards[1])) / 2)
    assert stats["accuracy"].mean == pytest.approx(sum(c > r for c, r in zip(*rewards, strict=True)) / 2)
    assert stats["logp_chosen"].mean == pytest.approx(sum(LOGP[:4]) / 2)
    assert stats["logp_rejected"].mean == pytest.approx(sum(LOGP[4:6]) / 2)


def test_pairs_without_reference_logprobs_are_refused() -> None:
    with pytest.raises(ShapeError, match="no reference logprobs yet"):
        loss_of().items(Outputs(logp=torch.tensor(LOGP)), pairs())


def test_recording_finds_the_data_flow() -> None:
    cfg, transport = config(), RecordingTransport()
    roles = RoleSet(
        {"actor": transport.handle("actor", Learner), "reference": transport.handle("reference", Reference)}
    )
    Synchronous(dpo, transport, roles, cfg).step("pairs", dpo.initial_state(cfg))
    assert [(n.role, n.method, n.inputs) for n in transport.nodes] == [
        ("reference", "logprobs", ()),
        ("controller", "advantages", (0,)),
        ("actor", "step", (1,)),
        ("controller", "merged_by_role", (1,)),
    ]


def engine_of(folder: Any, lora_rank: int = 0, **changes: Any) -> ModelEngine:
    model = load_causal_lm(ModelConfig(path=str(folder), lora_rank=lora_rank))
    return ModelEngine(model, OptimConfig(lr=1e-3, schedule="constant"), **changes)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_it_starts_at_log_two_and_learns_the_preference(lora_rank: int, tiny_llama_folder: Any) -> None:
    engine = engine_of(tiny_llama_folder, lora_rank)
    reference = engine if lora_rank else engine.snapshot()
    objects = {
        "actor": Learner(engine, lambda folder: nullcontext()),
        "reference": Reference(reference, 1.0, adapter=not lora_rank),
    }
    transport, cfg = LocalTransport(), config()
    roles = RoleSet({name: transport.handle(name, role) for name, role in objects.items()})
    schedule, state, stats = Synchronous(dpo, transport, roles, cfg), dpo.initial_state(cfg), []
    for _ in range(12):
        result = schedule.step(pairs(), state)
        state = result.state
        stats.append(result.stats)
    assert stats[0]["dpo/loss"].mean == pytest.approx(math.log(2), abs=1e-6)
    assert stats[0]["dpo/margin"].mean == pytest.approx(0.0, abs=1e-6)
    assert stats[-1]["dpo/loss"].mean < stats[0]["dpo/loss"].mean
    assert stats[-1]["dpo/margin"].mean > 0
    assert stats[0]["data/pairs"].mean == 2
    assert stats[0]["data/trained_tokens"].mean == 6


def test_the_gradient_does_not_depend_on_how_pairs_are_cut(tiny_llama_folder: Any) -> None:
    batch, loss = with_reference(pairs()), loss_of(beta=0.5, label_smoothing=0.1)
    whole = engine_of(tiny_llama_folder, tokens_per_micro_batch=1000).gradients(batch, loss)
    cut = engine_of(tiny_llama_folder, tokens_per_micro_batch=1).gradients(batch, loss)
    assert whole.keys() == cut.keys()
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-4, atol=1e-6)
