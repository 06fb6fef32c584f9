"""Many ranks compute what one process computes: gradients, two updates, statistics, inference, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_kit as kit
import pytest
import ranks_kit
import torch
import torch.distributed as dist
from spmd_kit import run_ranks

from tutelage.errors import ConfigError, ModelError, TrainingError
from tutelage.layout import Layout

LR = 1e-2
CASES = ("tokens", "sorted", "values", "pairs")


def require_equal_runs(ours: list[dict], theirs: dict, rel: float = 1e-6) -> None:
    """Every rank has the one process's gradient, statistics and weights; Adam may move a weight by 0.1 lr more."""
    for one in ours:
        kit.require_close(one["gradients"], theirs["gradients"], rel)
        for mine, other in zip([one["before"], *one["stats"]], [theirs["before"], *theirs["stats"]], strict=True):
            assert mine.keys() == other.keys()
            for name in mine:
                if name != "micro_batches":
                    assert mine[name].mean == pytest.approx(other[name].mean, rel=10 * rel, abs=1e-6), name
                    assert mine[name].weight == other[name].weight, name
        for name, weight in theirs["weights"].items():
            assert float((one["weights"][name] - weight).abs().max()) < 0.1 * LR, name
    assert all(one["stats"] == ours[0]["stats"] for one in ours), "ranks report different numbers"


def all_cases(rank: int, world: int, folder: Path, layout: str, settings: dict | None, changes: dict) -> dict:
    return {
        case: ranks_kit.two_steps(case, folder, ranks_kit.LAYOUTS[layout], settings, **changes)
        for case in CASES
        if settings is None or case in ("tokens", "sorted")
    }


@pytest.fixture(scope="module")
def one_process(tiny_llama_folder):
    """Each run is made once."""
    made: dict[Any, dict] = {}

    def run(case: str, settings: dict | None = None) -> dict:
        key = (case, str(settings))
        if key not in made:
            made[key] = ranks_kit.two_steps(case, tiny_llama_folder, None, settings)
        return made[key]

    return run


@pytest.mark.parametrize(
    "layout",
    ["shard 2", "hsdp 2x2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("replicate 2", "shard 4"))],
)
def test_gradients_and_two_updates_equal_one_process(layout, one_process, tiny_llama_folder):
    world = ranks_kit.LAYOUTS[layout].size
    ours = run_ranks(all_cases, world, tiny_llama_folder, layout, None, {"tokens_per_micro_batch": 20})
    for case in CASES:
        require_equal_runs([one[case] for one in ours], one_process(case))
        assert ours[0][case]["stats"][0]["micro_batches"].mean >= world, "several micro-batches"


@pytest.mark.parametrize("layout", ["replicate 2", pytest.param("hsdp 2x2", marks=pytest.mark.slow)])
def test_lora_on_ranks_equals_one_process(layout, one_process, tiny_llama_folder):
    settings = {"lora_rank": 2}
    world = ranks_kit.LAYOUTS[layout].size
    ours = run_ranks(all_cases, world, tiny_llama_folder, layout, settings, {"tokens_per_micro_batch": 20})
    for case in ("tokens", "sorted"):
        assert all(".lora_" in name for name in ours[0][case]["gradients"])
        require_equal_runs([one[case] for one in ours], one_process(case, settings))


@pytest.mark.parametrize("budget", [None, 60_000], ids=["all", "by budget"])
def test_checkpointed_blocks_and_one_sum_for_all_micro_batches_change_nothing(one_process, tiny_llama_folder, budget):
    changes = {"tokens_per_micro_batch": 12, "sum_once": True}
    settings = {"gradient_checkpointing": True, "activation_bytes": budget}
    ours = run_ranks(all_cases, 2, tiny_llama_folder, "shard 2", settings, changes)
    for case in ("tokens", "sorted"):
        found = [one[case] for one in ours]
        for one in found:
            for stats in one["stats"]:
                recomputed = stats.pop("recomputed_blocks", None)
                assert (recomputed is None) == (budget is None)
                # one entry for every pass of every rank, those that keep a rank in step with the others included
                assert recomputed is None or recomputed.weight >= stats["micro_batches"].mean
        require_equal_runs(found, one_process(case))


def block_sizes(rank: int, world: int, folder: Path, layout: str | None) -> tuple[float, float]:
    settings = {"gradient_checkpointing": True, "activation_bytes": 1}
    layout_ = None if layout is None else ranks_kit.LAYOUTS[layout]
    engine, batch, loss = ranks_kit.make("tokens", folder, layout_, settings, tokens_per_micro_batch=10_000)
    engine.gradients(batch.select(torch.zeros(world, dtype=torch.int64)), loss)
    sizes = engine.model.trunk.recompute.sizes
    return sizes.kept, sizes.entering


def test_gathered_weights_do_not_count_as_activations(tiny_llama_folder):
    """Each rank has one and the same sequence, as the one process has."""
    expected = block_sizes(0, 1, tiny_llama_folder, None)
    for found in run_ranks(block_sizes, 2, tiny_llama_folder, "shard 2"):
        assert found == pytest.approx(expected, rel=1e-3)


def few_items(rank: int, world: int, folder: Path, layout: str, counts: tuple[int, ...]) -> list[dict]:
    found = []
    for case in ("tokens", "sorted"):
        engine, batch, loss = ranks_kit.make(case, folder, ranks_kit.LAYOUTS[layout], tokens_per_micro_batch=8)
        for count in counts:
            part = batch.select(torch.arange(count))
            gradients = engine.gradients(part, loss)
            stats = engine.evaluate(part, loss)
            found.append({"gradients": gradients, "stats": stats, "case": case, "count": count})
    return found


@pytest.mark.parametrize(
    ("layout", "counts"), [("replicate 2", (1, 3)), pytest.param("shard 4", (3, 5), marks=pytest.mark.slow)]
)
def test_fewer_items_than_ranks_and_uneven_numbers_of_micro_batches(layout, counts, tiny_llama_folder):
    world = ranks_kit.LAYOUTS[layout].size
    for one in run_ranks(few_items, world, tiny_llama_folder, layout, counts):
        for found in one:
            engine, batch, loss = ranks_kit.make(found["case"], tiny_llama_folder, None)
            part = batch.select(torch.arange(found["count"]))
            theirs = engine.evaluate(part, loss)
            if found["count"] > 1 or found["case"] == "tokens":
                kit.require_close(found["gradients"], engine.gradients(part, loss), 1e-6)
            for name, stat in found["stats"].items():
                assert stat.mean == pytest.approx(theirs[name].mean, rel=1e-5, nan_ok=True), name
                assert stat.weight == theirs[name].weight, "a filler is counted nowhere"


def in_bfloat16(rank: int, world: int, folder: Path, layout: str) -> dict:
    engine = ranks_kit.policy(folder, ranks_kit.LAYOUTS[layout], {"dtype": "bfloat16"}, tokens_per_micro_batch=20)
    gradients = engine.gradients(kit.batch(), kit.TokenLoss())
    stats = [engine.step(kit.batch(), kit.TokenLoss()) for _ in range(2)]
    weights = engine.state()["weights"]
    return {"gradients": gradients, "stats": stats, "types": {w.dtype for w in weights.values()}}


@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
@pytest.mark.parametrize("layout", ["shard 2", pytest.param("replicate 2", marks=pytest.mark.slow)])
def test_bfloat16_computes_and_float32_remembers(layout, one_process, tiny_llama_folder):
    exact = one_process("tokens")
    for one in run_ranks(in_bfloat16, 2, tiny_llama_folder, layout):
        kit.require_close(one["gradients"], exact["gradients"], 0.05)
        assert one["types"] == {torch.float32}
        for mine, other in zip(one["stats"], exact["stats"], strict=True):
            assert mine["loss"].mean == pytest.approx(other["loss"].mean, rel=0.02)


class NanOnOneRank(kit.TokenLoss):
    def items(self, out, batch):
        items, stats = super().items(out, batch)
        return (items * float("nan") if "3" in batch.ids else items), stats


class NanScalars(kit.SortedLoss):
    def scalars(self, out, batch):
        bad = torch.tensor([i == "5" for i in batch.ids])
        return torch.where(bad[:, None], float("nan"), super().scalars(out, batch))


class BrokenOnOneRank(kit.TokenLoss):
    def items(self, out, batch):
        if "3" in batch.ids:
            raise KeyError("a bug of a loss")
        return super().items(out, batch)


def refusals(rank: int, world: int, folder: Path, layout: str, sum_once: bool) -> dict:
    engine = ranks_kit.policy(folder, ranks_kit.LAYOUTS[layout], tokens_per_micro_batch=12, sum_once=sum_once)
    before = engine.gradients(kit.batch(), kit.TokenLoss())
    texts = []
    for loss in (NanOnOneRank(), NanScalars(), BrokenOnOneRank()):
        try:
            engine.step(kit.batch(), loss)
        except Exception as error:
            texts.append((type(error).__name__, str(error)))
    long = kit.sequences(lens=((500, 40),)) if rank == 1 else kit.sequences()
    try:
        engine.logprobs(long, 1.0)
    except ModelError as error:
        texts.append((type(error).__name__, str(error)))
    after = engine.gradients(kit.batch(), kit.TokenLoss())
    return {"texts": texts, "same": all(torch.equal(before[n], after[n]) for n in before), "updates": engine.updates}


@pytest.mark.parametrize(
    ("layout", "sum_once"),
    [
        ("shard 2", False),
        pytest.param("shard 2", True, marks=pytest.mark.slow),
        pytest.param("replicate 2", False, marks=pytest.mark.slow),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all_before_a_weight_moves(layout, sum_once, tiny_llama_folder):
    found = run_ranks(refusals, 2, tiny_llama_folder, layout, sum_once)
    for one in found:
        (nan, text), (scalars, coupled), (_, broken), (_, long) = one["texts"]
        assert nan == scalars == TrainingError.__name__
        assert "NanOnOneRank is not finite at update 1, first in item 3 of the mini-batch" in text
        assert "(on rank " in text
        assert "NanScalars is not finite at update 1, first in item 5 of the mini-batch" in coupled
        assert "a bug of a loss" in broken
        assert "540 tokens" in long
        assert "(on rank 1)" in long
        assert one["same"]
        assert one["updates"] == 0
    assert {one["texts"][2][0] for one in found} == {"KeyError", "TrainingError"}, "a bug is itself where it happened"


def inference(rank: int, world: int, folder: Path, layout: str) -> dict:
    """Rows of this rank only; the last rank has none."""
    shape = ranks_kit.LAYOUTS[layout]
    rows = [torch.arange(0, 5), torch.arange(5, 8), torch.arange(0), torch.arange(0)]
    mine = rows[rank] if world > 2 else rows[rank + 1]
    seqs = kit.sequences().select(mine)
    engine = ranks_kit.policy(folder, shape, {"lora_rank": 2}, tokens_per_micro_batch=20)
    with torch.no_grad():
        engine.logprobs(seqs, 1.0, adapter=False)  # the adapter off in the first forward must not freeze it
    engine.step(kit.batch(), kit.TokenLoss())
    critic, reward = ranks_kit.scalar(folder, "value", shape), ranks_kit.scalar(folder, "reward", shape)
    return {
        "rows": mine,
        "on": engine.logprobs(seqs, 1.0).flat,
        "off": engine.logprobs(seqs, 1.0, adapter=False).flat,
        "values": critic.values(seqs).flat,
        "scores": reward.scores(seqs),
    }


@pytest.mark.parametrize("layout", ["shard 2", pytest.param("hsdp 2x2", marks=pytest.mark.slow)])
def test_inference_of_uneven_rows_with_the_adapter_on_and_off(layout, tiny_llama_folder):
    engine = ranks_kit.policy(tiny_llama_folder, None, {"lora_rank": 2})
    engine.step(kit.batch(), kit.TokenLoss())
    critic = ranks_kit.scalar(tiny_llama_folder, "value", None)
    reward = ranks_kit.scalar(tiny_llama_folder, "reward", None)
    found = run_ranks(inference, ranks_kit.LAYOUTS[layout].size, tiny_llama_folder, layout)
    assert [len(one["scores"]) for one in found] == ([5, 3, 0, 0] if len(found) == 4 else [3, 0])
    for one in found:
        seqs = kit.sequences().select(one["rows"])
        for name, expected in (
            ("on", engine.logprobs(seqs, 1.0).flat if len(seqs) else torch.zeros(0)),
            ("off", engine.logprobs(seqs, 1.0, adapter=False).flat if len(seqs) else torch.zeros(0)),
            ("values", critic.values(seqs).flat if len(seqs) else torch.zeros(0)),
            ("scores", reward.scores(seqs) if len(seqs) else torch.zeros(0)),
        ):
            torch.testing.assert_close(one[name], expected, atol=2e-4 if name == "on" else 1e-5, rtol=0)
        if len(seqs):
            assert float((one["on"] - one["off"]).abs().max()) > 1e-2


def frozen_copies(rank: int, world: int, folder: Path) -> dict:
    engine = ranks_kit.policy(folder, Layout(shard=2))
    seqs = kit.sequences()
    reference = engine.snapshot()
    before = engine.logprobs(seqs, 1.0).flat
    copied = reference.logprobs(seqs, 1.0).flat
    engine.step(kit.batch(), kit.TokenLoss())
    moved = engine.logprobs(seqs, 1.0).flat
    parts = [p.to_local().numel() / p.numel() for p in reference.model.module.parameters()]
    return {
        "same": torch.equal(before, copied) and torch.equal(copied, reference.logprobs(seqs, 1.0).flat),
        "moved": float((moved - before).abs().max()),
        "parts": parts,
        "trained": any(p.requires_grad for p in reference.model.module.parameters()),
    }


def test_a_snapshot_of_a_sharded_policy_is_sharded_and_stays(tiny_llama_folder):
    for one in run_ranks(frozen_copies, 2, tiny_llama_folder):
        assert one["same"]
        assert one["moved"] > 1e-3
        assert max(one["parts"]) < 0.6
        assert not one["trained"]


def generation(rank: int, world: int, folder: Path) -> dict:
    engine = ranks_kit.policy(folder, Layout(shard=2))
    engine.step(kit.batch(), kit.TokenLoss())
    tokens = torch.tensor([[5, 6, 7, 8]])
    found = []
    with torch.no_grad(), engine.forward_context():
        for _ in range(1 + 3 * rank):  # a rank alone goes on
            cut = torch.tensor([0, 4], dtype=torch.int32)
            out = engine.model.model(input_ids=tokens, cu_seq_lens_q=cut, use_cache=False)
            found.append(out.logits)
    sharded = all(p.to_local().numel() < p.numel() for p in engine.model.module.parameters())
    stats = engine.step(kit.batch(), kit.TokenLoss())
    return {"logits": found[0], "sharded": sharded, "loss": stats["loss"].mean}


def test_generation_runs_a_different_number_of_forwards_on_every_rank(tiny_llama_folder):
    engine = ranks_kit.policy(tiny_llama_folder, None)
    engine.step(kit.batch(), kit.TokenLoss())
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        cut = torch.tensor([0, 4], dtype=torch.int32)
        expected = engine.model.model(input_ids=tokens, cu_seq_lens_q=cut, use_cache=False).logits
    loss = engine.step(kit.batch(), kit.TokenLoss())["loss"].mean
    for one in run_ranks(generation, 2, tiny_llama_folder):
        torch.testing.assert_close(one["logits"], expected, atol=1e-3, rtol=0)
        assert one["sharded"]
        assert one["loss"] == pytest.approx(loss, rel=1e-3)


def topmost(rank: int, world: int, folder: Path) -> dict:
    found = {}
    for layers in (0, 1):
        engine = ranks_kit.scalar(folder, "reward", Layout(shard=2), train_layers=layers)
        found[layers] = engine.gradients(kit.pairs(), kit.PairLoss())
    try:
        engine.model.features = object()
        type(engine)(engine.model, kit.optim(), ranks=engine.ranks)
    except ModelError as error:
        found["cached"] = str(error)
    return found


def test_a_frozen_lower_part_stays_frozen_on_shards(tiny_llama_folder):
    theirs = {
        layers: ranks_kit.scalar(tiny_llama_folder, "reward", None, train_layers=layers).gradients(
            kit.pairs(), kit.PairLoss()
        )
        for layers in (0, 1)
    }
    for one in run_ranks(topmost, 2, tiny_llama_folder):
        for layers in (0, 1):
            kit.require_close(one[layers], theirs[layers], 1e-6)
        assert "hidden states are cached" in one["cached"]


def wrong_worlds(rank: int, world: int) -> list[str]:
    texts = []
    for layout in (Layout(shard=3), Layout(replicate=4)):
        try:
            ranks_kit.MESHES.of(layout)
        except ConfigError as error:
            texts.append(str(error))
    try:
        ranks_kit.mesh_ranks(Layout(shard=2), offload=True).sharding()
    except ConfigError as error:
        texts.append(str(error))
    same = ranks_kit.MESHES.of(Layout(shard=2)) is ranks_kit.MESHES.of(Layout(shard=2))
    return [*texts, str(same), str(dist.get_world_size())]


def test_a_layout_of_another_size_and_an_offload_without_accelerator_are_refused():
    with pytest.raises(ConfigError, match="needs a process group, there is none"):
        ranks_kit.MESHES.of(Layout(shard=3))
    for three, four, offload, same, _ in run_ranks(wrong_worlds, 2):
        assert "the layout has 3 ranks (shard 3), the process group 2" in three
        assert "the layout has 4 ranks (replicate 4), the process group 2" in four
        assert "computes on the CPU already" in offload
        assert same == "True", "a mesh is made once"
