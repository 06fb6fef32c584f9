"""The `kto` stage against sums worked out in plain Python, and on a tiny model: cuts, ranks, starts, runs, resume."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from spmd_kit import run_ranks

from tutelage.algorithms import kto
from tutelage.build import run_recipe
from tutelage.build.data import balance_notes
from tutelage.config import KTOConfig, load_checked
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.demo.corpus import CorpusSize, write_corpus
from tutelage.demo.model import build_model_folder
from tutelage.engines.engine import ModelEngine
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import MeshRanks
from tutelage.errors import ConfigError, DataError, ShapeError
from tutelage.layout import Layout
from tutelage.math.unpaired_loss import RewardShift
from tutelage.models.load import load_causal_lm
from tutelage.protocols import CoupledLoss, SeparableLoss
from tutelage.reports.metrics_log import read_events, read_metrics
from tutelage.roles.learner import Learner
from tutelage.roles.reference import Reference
from tutelage.schedules import Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Labelled, Outputs, Ragged, Sequences, Unpaired

KINDS = ("kto", "apo_zero_unpaired", "bco")
PROMPTS = [[1], [2, 3], [4]]
ANSWERS, MISMATCHED = [[11, 12, 13], [14], [15, 16]], [[14], [15, 16], [11, 12, 13]]
LOGP = [
    -1.0,
    -2.0,
    -0.5,
    -3.0,
    -0.9,
    -1.1,
    -9.0,
    -2.0,
    -1.5,
    -0.5,
    -0.25,
    -4.0,
]  # answers 3 + 1 + 2, mismatched 1 + 2 + 3
REF = [-1.5, -1.0, -0.5, -2.0, -0.2, -1.6, -9.5, -2.5, -1.75, -1.0, -0.5, -4.0]
DESIRABLE = [True, False, True]


def config(**settings: Any) -> KTOConfig:
    return KTOConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "kto": settings})


def unpaired() -> Unpaired:
    """The second token of the third answer is not trained."""
    answers = Sequences.build(PROMPTS, ANSWERS, [[True] * 3, [True], [True, False]])
    mismatched = Sequences.build(PROMPTS, MISMATCHED)
    return Unpaired(answers, mismatched, torch.tensor(DESIRABLE), ("a", "b", "c"))


def labelled() -> Labelled:
    batch = unpaired()
    return Labelled(batch.answers, batch.desirable, batch.ids)


def with_reference(batch: Any) -> Any:
    lens = batch.sequences.response_lens
    return batch.adding(ref_logp=Ragged(torch.tensor(REF[: int(lens.sum())]), lens))


def batch_of(kind: str) -> Any:
    batch = with_reference(unpaired() if kind == "kto" else labelled())
    return batch.adding(shift=torch.full((3,), 0.2)) if kind == "bco" else batch


def ratios() -> tuple[list[float], list[float]]:
    gaps = [a - b for a, b in zip(LOGP, REF, strict=True)]
    return [sum(gaps[:3]), gaps[3], gaps[4]], [gaps[6], sum(gaps[7:9]), sum(gaps[9:])]  # the hole, gaps[5], is not read


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_kto_is_the_papers_sum_with_the_kl_of_the_whole_mini_batch() -> None:
    loss = kto.training_loss(config(beta=0.5, desirable_weight=1.25, undesirable_weight=0.5))
    batch = with_reference(unpaired())
    scalars = loss.scalars(Outputs(logp=torch.tensor(LOGP)), batch)
    value, stats = loss.couple(scalars, batch)
    own, other = ratios()
    z0 = max(0.0, sum(other) / 3)
    assert z0 > 0
    wanted = []
    for r, good in zip(own, DESIRABLE, strict=True):
        wanted.append(1.25 * (1 - sigmoid(0.5 * (r - z0))) if good else 0.5 * (1 - sigmoid(0.5 * (z0 - r))))
    assert float(value) == pytest.approx(sum(wanted) / 3, rel=1e-6)
    assert stats["kl"].mean == pytest.approx(z0)
    assert stats["rewards/chosen"].mean == pytest.approx(0.5 * (own[0] + own[2]) / 2)
    assert stats["rewards/rejected"].mean == pytest.approx(0.5 * own[1])
    assert stats["rewards/margins"].mean == pytest.approx(0.5 * ((own[0] + own[2]) / 2 - own[1]))
    assert stats["logps/chosen"].mean == pytest.approx((sum(LOGP[:3]) + LOGP[4]) / 2)
    assert stats["logps/rejected"].mean == pytest.approx(LOGP[3])
    assert stats["accuracy"].mean == pytest.approx(((own[0] > own[1]) + (own[2] > own[1])) / 2)


def test_the_kl_estimate_has_no_gradient_and_is_never_negative() -> None:
    loss = kto.training_loss(config())
    batch = with_reference(unpaired())
    scalars = loss.scalars(Outputs(logp=torch.tensor(LOGP)), batch).requires_grad_(True)
    loss.couple(scalars, batch)[0].backward()
    assert scalars.grad is not None
    assert scalars.grad[:, 1].tolist() == [0.0, 0.0, 0.0]
    assert bool((scalars.grad[:, 0] != 0).all())
    low = torch.tensor([*LOGP[:6], *(x - 5 for x in LOGP[6:])])
    assert loss.couple(loss.scalars(Outputs(logp=low), batch), batch)[1]["kl"].mean == 0.0


@pytest.mark.parametrize("kind", ["apo_zero_unpaired", "bco"])
def test_losses_of_single_answers_are_sums_over_trained_tokens(kind: str) -> None:
    loss, batch = kto.training_loss(config(loss=kind, beta=0.5)), batch_of(kind)
    items, stats = loss.items(Outputs(logp=torch.tensor(LOGP[:6])), batch)
    own, _ = ratios()
    if kind == "bco":
        chances = [sigmoid(0.5 * r - 0.2) for r in own]
        wanted = [-math.log(p if good else 1 - p) for p, good in zip(chances, DESIRABLE, strict=True)]
    else:
        wanted = [1 - sigmoid(0.5 * r) if good else sigmoid(0.5 * r) for r, good in zip(own, DESIRABLE, strict=True)]
    assert items.tolist() == pytest.approx(wanted, rel=1e-5)
    assert loss.weights(batch).flat.tolist() == pytest.approx([1 / 3] * 3)
    assert stats["rewards/chosen"].mean == pytest.approx(0.5 * (own[0] + own[2]) / 2)


def test_the_held_out_loss_is_the_training_loss_with_the_sets_own_shift() -> None:
    batch = batch_of("apo_zero_unpaired")
    loss, held = (f(config(loss="apo_zero_unpaired")) for f in (kto.training_loss, kto.held_out_loss))
    out = Outputs(logp=torch.tensor(LOGP[:6]))
    value, stats = held.couple(held.scalars(out, batch), batch)
    assert float(value) == pytest.approx(float(loss.items(out, batch)[0].mean()))
    own, _ = ratios()
    assert stats["rewards/margins"].mean == pytest.approx(0.1 * ((own[0] + own[2]) / 2 - own[1]))
    held = kto.held_out_loss(config(loss="bco"))
    delta = 0.1 * (0.5 * (own[0] + own[2]) / 2 + 0.5 * own[1])
    assert held.couple(held.scalars(out, batch), batch)[1]["delta"].mean == pytest.approx(delta)


def test_kinds_of_losses_and_what_they_lack() -> None:
    for kind, protocol in zip(KINDS, (CoupledLoss, SeparableLoss, SeparableLoss), strict=True):
        assert isinstance(kto.training_loss(config(loss=kind)), protocol)
        assert isinstance(kto.held_out_loss(config(loss=kind)), CoupledLoss)
    loss = kto.training_loss(config())
    with pytest.raises(ShapeError, match="no reference logprobs yet"):
        loss.couple(torch.zeros(3, 2, requires_grad=True), unpaired())
    with pytest.raises(ShapeError, match="no reward shift yet"):
        kto.training_loss(config(loss="bco")).items(Outputs(logp=torch.tensor(LOGP[:6])), with_reference(labelled()))
    with pytest.raises(ShapeError, match="no logprobs of the policy yet"):
        kto.advantages(with_reference(labelled()), kto.KTOState(0), config(loss="bco"))


def test_bcos_shift_runs_over_batches_and_is_in_the_checkpoint() -> None:
    cfg, batch = config(loss="bco", beta=0.5), with_reference(labelled())
    lens = batch.sequences.response_lens
    batch = batch.adding(old_logp=Ragged(torch.tensor(LOGP[:6]), lens))
    found, state, stats = kto.advantages(batch, kto.initial_state(cfg), cfg)
    own, _ = ratios()
    first = 0.5 * (0.5 * (own[0] + own[2]) / 2 + 0.5 * own[1])
    assert stats["data/delta"].mean == pytest.approx(first)
    assert found.shift.tolist() == pytest.approx([first] * 3)
    again = kto.state_from(json.loads(json.dumps(state.state_dict())))
    assert again == state
    other = batch.adding(old_logp=Ragged(torch.zeros(6), lens))
    _, after, _ = kto.advantages(other, again, cfg)
    both = RewardShift().after(torch.tensor([0.5 * r for r in own]), batch.desirable)
    zero = [-sum(REF[:3]), -REF[3], -REF[4]]
    both = both.after(torch.tensor([0.5 * r for r in zero]), batch.desirable)
    assert after.shift.delta == pytest.approx(both.delta, rel=1e-6)
    assert after.step == 2


@pytest.mark.parametrize("kind", KINDS)
def test_recording_finds_the_data_flow(kind: str) -> None:
    cfg, transport = config(loss=kind), RecordingTransport()
    roles = RoleSet(
        {"actor": transport.handle("actor", Learner), "reference": transport.handle("reference", Reference)}
    )
    Synchronous(kto, transport, roles, cfg).step(transport.put(None), kto.initial_state(cfg))
    calls = [(n.role, n.method) for n in transport.nodes]
    asked = [("reference", "logprobs"), *([("actor", "logprobs")] if kind == "bco" else [])]
    assert calls == [*asked, ("controller", "advantages"), ("actor", "step"), ("controller", "merged_by_role")]


# ---- a tiny model


def engine_of(folder: Any, **changes: Any) -> ModelEngine:
    return ModelEngine(
        load_causal_lm(ModelConfig(path=str(folder))), OptimConfig(lr=1e-3, schedule="constant"), **changes
    )


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_where_policy_and_reference_are_one_and_learns(kind: str, tiny_llama_folder: Any) -> None:
    engine = engine_of(tiny_llama_folder)
    objects = {
        "actor": Learner(engine, lambda folder: nullcontext()),
        "reference": Reference(engine.snapshot(), 1.0, adapter=True),
    }
    transport, cfg = LocalTransport(), config(loss=kind)
    roles = RoleSet({name: transport.handle(name, role) for name, role in objects.items()})
    schedule, state, stats = Synchronous(kto, transport, roles, cfg), kto.initial_state(cfg), []
    for _ in range(6):
        result = schedule.step(unpaired() if kind == "kto" else labelled(), state)
        state = result.state
        stats.append(result.stats)
    assert stats[0]["kto/loss"].mean == pytest.approx(math.log(2) if kind == "bco" else 0.5, abs=1e-6)
    if kind == "kto":
        assert stats[0]["kto/kl"].mean == pytest.approx(0.0, abs=1e-5)
    assert stats[0]["kto/rewards/chosen"].mean == pytest.approx(0.0, abs=1e-6)
    assert stats[-1]["kto/loss"].mean < stats[0]["kto/loss"].mean
    assert stats[-1]["kto/rewards/chosen"].mean > stats[-1]["kto/rewards/rejected"].mean
    assert stats[0]["data/desirable"].mean == 2
    assert stats[0]["data/trained_tokens"].mean == 5


def moved(engine: ModelEngine, kind: str, order: list[int] | None = None) -> dict[str, torch.Tensor]:
    batch = batch_of(kind)
    batch = batch if order is None else batch.select(torch.tensor(order))
    return engine.gradients(batch, kto.training_loss(config(loss=kind, beta=0.5, **({} if kind == "bco" else W))))


W = {"desirable_weight": 1.2}


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_depends_neither_on_cuts_nor_on_order(kind: str, tiny_llama_folder: Any) -> None:
    whole = moved(engine_of(tiny_llama_folder, tokens_per_micro_batch=1000), kind)
    assert sum(float(g.square().sum()) for g in whole.values()) > 0
    for other in (
        moved(engine_of(tiny_llama_folder, tokens_per_micro_batch=1), kind),
        moved(engine_of(tiny_llama_folder, tokens_per_micro_batch=1000), kind, [2, 0, 1]),
    ):
        assert whole.keys() == other.keys()
        for name in whole:
            torch.testing.assert_close(other[name], whole[name], rtol=1e-4, atol=1e-6)


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    layout = MeshRanks(RankMeshes().of(Layout(replicate=2)))
    return {kind: moved(engine_of(folder, ranks=layout), kind) for kind in KINDS}


def test_two_ranks_compute_what_one_process_computes(tiny_llama_folder: Any) -> None:
    ranks = run_ranks(on_two_ranks, 2, str(tiny_llama_folder))
    for kind in KINDS:
        alone = moved(engine_of(tiny_llama_folder), kind)
        for one in ranks:
            for name in alone:
                torch.testing.assert_close(one[kind][name], alone[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_mini_batch_of_one_kind_learns_without_nan(name: str, kind: bool, tiny_llama_folder: Any) -> None:
    batch = batch_of(name).adding(desirable=torch.full((3,), kind))
    found = engine_of(tiny_llama_folder).step(batch, kto.training_loss(config(loss=name)))
    assert all(math.isfinite(stat.mean) for stat in found.values())
    assert ("rewards/chosen" in found) == kind
    assert "accuracy" not in found


def test_out_of_balance_data_is_told_with_numbers() -> None:
    good_and_bad = torch.tensor([True] * 3 + [False] * 1)
    (note,) = balance_notes(config(), good_and_bad)
    assert "3 desirable answers x 1 over 1 undesirable ones x 1 is 3, outside of 1 to 1.33" in note
    assert "kto.desirable_weight from 0.333 to 0.444" in note
    assert balance_notes(config(desirable_weight=0.4), good_and_bad) == ()
    assert "there are no undesirable answers" in balance_notes(config(), torch.ones(2, dtype=torch.bool))[0]
    assert balance_notes(config(loss="bco"), good_and_bad) == ()
    assert (
        "in one direction only" in balance_notes(config(loss="apo_zero_unpaired"), torch.ones(2, dtype=torch.bool))[0]
    )
    for kind, name in ((True, "desirable"), (False, "undesirable")):
        with pytest.raises(DataError, match=f"all 2 training rows of .* are {name}, and kto.loss is bco"):
            balance_notes(config(loss="bco"), torch.full((2,), kind))
    with pytest.raises(ConfigError, match="every loss has the weight 0"):
        balance_notes(config(desirable_weight=0.0), torch.ones(2, dtype=torch.bool))


# ---- whole runs


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: Any, tiny_llama_folder: Path) -> Any:
    folder = tmp_path_factory.mktemp("kto")
    topics = ["tea", "cats", "rain", "bread", "music", "bikes", "trees", "maps", "snow", "sea"]
    rows = [{"prompt": f"what is {t}", "chosen": f"it is {t}", "rejected": "no no"} for t in topics]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(*overrides: str) -> Any:
        (folder / "recipe.yaml").write_text("algorithm: kto\nname: kto\n")
        own = [f"output_dir={folder}", f"model.path={tiny_llama_folder}", f"data.train={folder / 'rows.jsonl'}"]
        fixed = ["data.eval_fraction=0.3", "kto.batch_size=7", "kto.epochs=3", "optim.lr=1e-3", "max_steps=3"]
        return load_checked(str(folder / "recipe.yaml"), [*own, *fixed, *overrides])[0]

    return load


@pytest.mark.parametrize("kind", ["kto", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_a_run_learns_to_tell_held_out_answers_apart(kind: str, recipe: Any) -> None:
    result = run_recipe(recipe(f"kto.loss={kind}"), "plain")
    steps = [m for m in read_metrics(result.folder) if "kto/loss" in m]
    assert len(steps) == 3
    assert steps[0]["kto/loss"] == pytest.approx(math.log(2) if kind == "bco" else 0.5, abs=1e-5)
    after = result.summary["after"]
    assert 0.5 < after["eval/accuracy"] <= 1.0
    assert after["eval/rewards/margins"] > 0
    assert result.summary["before"]["eval/accuracy"] == pytest.approx(0.5, abs=0.5)
    notes = [e["message"] for e in read_events(result.folder) if e["kind"] == "data"]
    assert any("format preference" in note for note in notes)


def test_a_key_without_effect_is_refused(recipe: Any) -> None:
    with pytest.raises(ConfigError, match=r"kto.desirable_weight has no effect in this run"):
        recipe("kto.loss=bco", "kto.desirable_weight=2.0")


@pytest.mark.slow
@pytest.mark.parametrize("loss", KINDS)
def test_the_demo_recipe_takes_steps_on_the_demo_data(loss: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "data", 0, CorpusSize(8, 40, 16, 16))
    model = build_model_folder(tmp_path / "model", 0)
    own = [f"output_dir={tmp_path}", f"model.path={model}", f"kto.loss={loss}", "kto.batch_size=16", "max_steps=2"]
    data = [f"data.train={corpus.preferences}", f"data.eval={corpus.eval_preferences}"]
    result = run_recipe(load_checked("demo_kto", [*own, *data])[0], "plain")
    assert result.summary["steps"] == 2
    assert math.isfinite(result.summary["after"]["eval/accuracy"])
