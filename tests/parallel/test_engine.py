"""`ModelEngine` on cut rows and cut matrices: gradients, statistics, updates and saved weights of one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parallel_kit as kit
import pytest
import torch
from spmd_kit import run_ranks
from torch import Tensor

from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import MeshRanks
from tutelage.layout import Layout
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.types import Demonstrations, Outputs, Ragged, Stat, Stats

LAYOUTS = {
    "sequence 2": Layout(sequence=2),
    "context 2": Layout(context=2),
    "tensor 2": Layout(tensor=2),
    "shard 2, sequence 2": Layout(shard=2, sequence=2),
    "replicate 2, context 2": Layout(replicate=2, context=2),
    "shard 2, tensor 2": Layout(shard=2, tensor=2),
    "sequence 2, tensor 2": Layout(sequence=2, tensor=2),
}


@dataclass(frozen=True)
class TokenLoss:
    """logp^2 + 0.1 entropy per token; weight 1 / (tokens of the mini-batch)."""

    outputs: frozenset[str] = frozenset({"logp", "entropy"})

    def weights(self, batch: Demonstrations) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.full((int(lens.sum()),), 1.0 / int(lens.sum())), lens)

    def items(self, out: Outputs, batch: Demonstrations) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        assert out.entropy is not None
        return out.logp.square() + 0.1 * out.entropy, {"logp": Stat.of(out.logp)}


@dataclass(frozen=True)
class ValueLoss:
    """(V - 1)^2 per token, every token of weight 1 / B."""

    outputs: frozenset[str] = frozenset({"value"})

    def weights(self, batch: Demonstrations) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.full((int(lens.sum()),), 1.0 / len(lens)), lens)

    def items(self, out: Outputs, batch: Demonstrations) -> tuple[Tensor, Stats]:
        assert out.value is not None
        return (out.value - 1).square(), {"value": Stat.of(out.value)}


def batch() -> Demonstrations:
    seqs = kit.sequences("uneven")
    return Demonstrations(seqs, tuple(str(i) for i in range(len(seqs))))


def work(folder: Path, case: str, ranks: MeshRanks | None) -> dict[str, Any]:
    settings = ModelConfig(path=str(folder), lora_rank=2 if case == "lora" else 0)
    sharding = None if ranks is None else ranks.sharding()
    if case == "value":
        model: Any = load_scalar_model(settings, "value", tokenizer=kit.WordTokenizer(), sharding=sharding)
    else:
        model = load_causal_lm(settings, kit.WordTokenizer(), sharding=sharding)
    optim = OptimConfig(lr=1e-2, schedule="constant", tokens_per_micro_batch=24, max_grad_norm=0.5)
    engine = ModelEngine(model, optim, ranks=ranks, total_updates=2)
    loss = ValueLoss() if case == "value" else TokenLoss()
    found = {"gradients": engine.gradients(batch(), loss), "stats": [engine.step(batch(), loss) for _ in range(2)]}
    seqs = kit.sequences("uneven")
    found["numbers"] = engine.values(seqs).flat if case == "value" else engine.logprobs(seqs, 1.0).flat
    return found


MESHES = RankMeshes()


def on_ranks(rank: int, world: int, folder: Path, layout: str) -> dict[str, Any]:
    ranks = MeshRanks(MESHES.of(LAYOUTS[layout]))
    return {case: work(folder, case, ranks) for case in ("policy", "lora", "value")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "qwen3"
    kit.build("qwen3", tie_word_embeddings=True).save_pretrained(path)
    kit.WordTokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def one_process(folder):
    return {case: work(folder, case, None) for case in ("policy", "lora", "value")}


@pytest.mark.parametrize(
    "layout",
    [name if layout.size == 2 else pytest.param(name, marks=pytest.mark.slow) for name, layout in LAYOUTS.items()],
)
def test_an_update_is_that_of_one_process(layout, folder, one_process):
    world = LAYOUTS[layout].size
    for rank, found in enumerate(run_ranks(on_ranks, world, folder, layout)):
        for case, ours in found.items():
            theirs, what = one_process[case], f"{layout}, rank {rank}, {case}"
            rows = LAYOUTS[layout].data == 1
            numbers = {"numbers": ours["numbers"]} if rows else {}
            kit.require_equal(
                (numbers, ours["gradients"]), ({n: theirs[n] for n in numbers}, theirs["gradients"]), what
            )
            for mine, his in zip(ours["stats"], theirs["stats"], strict=True):
                for name in ("loss", "grad_norm"):
                    assert mine[name].mean == pytest.approx(his[name].mean, rel=2e-4), f"{what} {name}"


def in_bfloat16(rank: int, world: int, folder: Path, layout: str) -> dict[str, Any]:
    return bfloat16_work(folder, MeshRanks(MESHES.of(LAYOUTS[layout])))


def bfloat16_work(folder: Path, ranks: MeshRanks | None) -> dict[str, Any]:
    settings = ModelConfig(path=str(folder), dtype="bfloat16")
    model = load_causal_lm(settings, kit.WordTokenizer(), sharding=None if ranks is None else ranks.sharding())
    engine = ModelEngine(model, OptimConfig(lr=1e-2, schedule="constant"), ranks=ranks, total_updates=2)
    seen: set[torch.dtype] = set()
    product = model.trunk.model.layers[0].mlp.down_proj
    product.register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
    found = {"gradients": engine.gradients(batch(), TokenLoss())}
    stats = [engine.step(batch(), TokenLoss()) for _ in range(2)]
    masters = {weight.dtype for weight in engine.state()["weights"].values()}
    return {**found, "stats": stats, "computed": seen, "kept": masters}


@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
@pytest.mark.parametrize("layout", ["tensor 2", pytest.param("shard 2, tensor 2", marks=pytest.mark.slow)])
def test_bfloat16_computes_and_float32_remembers_where_matrices_are_cut(layout, folder, one_process):
    """float32 in one process is the reference; two ranks round to bfloat16 where one does, and sums once more."""
    exact = one_process["policy"]
    for found in run_ranks(in_bfloat16, LAYOUTS[layout].size, folder, layout):
        assert found["computed"] == {torch.bfloat16}
        assert found["kept"] == {torch.float32}
        for name, gradient in exact["gradients"].items():
            off = float((found["gradients"][name] - gradient).norm() / gradient.norm())
            assert off < 0.1, name
        for mine, his in zip(found["stats"], exact["stats"], strict=True):
            assert mine["loss"].mean == pytest.approx(his["loss"].mean, rel=0.03)
