"""Sharded models: loaded slice by slice, exported in files, published tensor by tensor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import engine_kit as kit
import pytest
import ranks_kit
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from spmd_kit import run_ranks
from transformers import AutoModel, AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM

from tutelage.errors import ModelError
from tutelage.layout import Layout
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.models.sharding import Sharding, whole

SHARD = Layout(shard=2)


def held(model) -> dict:
    """Whole weights and buffers, and the largest part of a matrix that this rank holds."""
    parameters = dict(model.module.named_parameters())
    matrices = [p for p in parameters.values() if p.ndim == 2 and p.shape[0] > 1]
    return {
        "weights": {n: whole(p.detach()) for n, p in parameters.items()},
        "buffers": {n: b.clone() for n, b in model.module.named_buffers()},
        "part": max(p.to_local().numel() / p.numel() for p in matrices),
        "tokens": model.trunk.layout,
        "causal": model.trunk.causal,
        "attention": model.trunk.model.config._attn_implementation,
        "trained": sorted(n for n, p in parameters.items() if p.requires_grad),
    }


def load(kind: str, folder: Path, sharding: Sharding | None, **settings: int) -> Any:
    cfg = kit.ModelConfig(path=str(folder), **settings)
    if kind == "policy":
        return load_causal_lm(cfg, sharding=sharding, seed=3)
    keep = 1 if kind == "cut" else None
    return load_scalar_model(cfg, "reward", sharding=sharding, seed=3, keep_layers=keep)


def load_all(rank: int, world: int, folder: Path, kinds: tuple[str, ...]) -> dict:
    sharding = ranks_kit.mesh_ranks(SHARD).sharding()
    return {
        (kind, lora): held(load(kind, folder, sharding, lora_rank=lora))
        for kind in kinds
        for lora in ((0, 2) if kind != "cut" else (0,))
    }


@pytest.fixture(scope="module")
def tiny_gemma_folder(tmp_path_factory, tiny_tokenizer) -> Path:
    """Its embedding is scaled by a buffer that no file holds; what makes the buffer draws the weights beside it too."""
    config = GemmaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.15,
    )
    folder = tmp_path_factory.mktemp("gemma")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(14)
        GemmaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", ("policy", "reward", "cut")),
        ("gemma", ("policy",)),
        pytest.param("gpt2", ("policy", "reward"), marks=pytest.mark.slow),
        pytest.param("bert", ("reward",), marks=pytest.mark.slow),
    ],
)
def test_slices_of_every_kind_of_model_are_the_weights_that_transformers_loads(name, kinds, request):
    folder = request.getfixturevalue(f"tiny_{name}_folder")
    found = run_ranks(load_all, 2, folder, kinds)
    assert len(found[0]) == {"llama": 5, "gemma": 2, "gpt2": 4, "bert": 2}[name]
    for one in found:
        for key, ours in one.items():
            kind, lora = key
            theirs = load(kind, folder, None, lora_rank=lora)
            expected = dict(theirs.module.named_parameters())
            assert ours["weights"].keys() == expected.keys()
            for name, weight in expected.items():
                assert torch.equal(ours["weights"][name], weight), (key, name)
            buffers = dict(theirs.module.named_buffers())
            assert ours["buffers"].keys() == buffers.keys()
            for name, buffer in buffers.items():
                assert torch.equal(ours["buffers"][name], buffer), (key, name)
            assert ours["trained"] == sorted(n for n, p in expected.items() if p.requires_grad)
            assert ours["part"] <= 0.6
            assert (ours["tokens"], ours["causal"]) == (theirs.trunk.layout, theirs.trunk.causal)
            assert ours["attention"] == theirs.trunk.model.config._attn_implementation
            if name == "gemma":
                assert [float(b) for n, b in ours["buffers"].items() if n.endswith("embed_scale")] == [8.0]  # sqrt(64)


def broken_folder(source: Path, to: Path, damage: str) -> Path:
    shutil.copytree(source, to)
    file = to / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "missing":
        del weights[name]
    elif damage == "shape":
        weights[name] = weights[name][:7].clone()
    elif damage == "nan":
        weights[name][-1, -1] = float("nan")  # in the part of the last rank alone
    save_file(weights, file, {"format": "pt"})
    if damage == "short":
        file.write_bytes(file.read_bytes()[:-500])
    return to


def load_broken(rank: int, world: int, folders: list[Path]) -> list[str]:
    sharding = ranks_kit.mesh_ranks(SHARD).sharding()
    texts = []
    for folder in folders:
        try:
            load_causal_lm(kit.ModelConfig(path=str(folder)), sharding=sharding)
        except ModelError as error:
            texts.append(str(error))
    return texts


@pytest.mark.filterwarnings("ignore")
def test_an_incomplete_folder_is_refused_on_every_rank(tiny_llama_folder, tmp_path):
    folders = [broken_folder(tiny_llama_folder, tmp_path / d, d) for d in ("missing", "shape", "nan", "short")]
    for missing, shape, nan, short in run_ranks(load_broken, 2, folders):
        assert "has no weights for model.layers.1.mlp.up_proj.weight" in missing
        assert "has weights of another shape: model.layers.1.mlp.up_proj.weight is (7, 64)" in shape
        assert "NaN or infinite: model.layers.1.mlp.up_proj.weight (on rank 1)" in nan
        assert "cannot be" in short


def export(rank: int, world: int, folder: Path, settings: dict, to: Path, layout: Layout) -> None:
    engine = ranks_kit.policy(folder, layout, settings)
    engine.load_state(to / "state")
    engine.save_pretrained(to / "policy")
    reward = ranks_kit.scalar(folder, "reward", layout, settings)
    reward.save_pretrained(to / "reward")


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}], ids=["full", "lora"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(SHARD, id="sharded"),
        pytest.param(Layout(replicate=2), id="replicated", marks=pytest.mark.slow),
    ],
)
def test_the_folder_that_ranks_write_equals_the_local_one_bit_for_bit(settings, layout, tiny_llama_folder, tmp_path):
    engine = ranks_kit.policy(tiny_llama_folder, None, settings)
    engine.step(kit.batch(), kit.TokenLoss())
    engine.save_state(tmp_path / "state")
    engine.save_pretrained(tmp_path / "local")
    ranks_kit.scalar(tiny_llama_folder, "reward", None, settings).save_pretrained(tmp_path / "local_reward")
    run_ranks(export, 2, tiny_llama_folder, settings, tmp_path, layout)
    files = sorted((tmp_path / "policy").glob("*.safetensors"))
    sizes = [f.stat().st_size for f in files]
    if layout is SHARD:
        assert len(files) >= 2
        assert max(sizes) < 0.6 * sum(sizes), "no rank held the whole model"
    else:
        assert [f.name for f in files] == ["model.safetensors"]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("policy", "local"))
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    assert ours.config.to_dict() == {**theirs.config.to_dict(), "_name_or_path": ours.config._name_or_path}
    names = {p.name for p in (tmp_path / "local").iterdir() if not p.name.startswith("model")}
    assert {p.name for p in (tmp_path / "policy").iterdir() if not p.name.startswith("model")} == names
    if settings:
        adapters = [load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("policy", "local")]
        assert adapters[0].keys() == adapters[1].keys()
        assert all(torch.equal(adapters[0][n], adapters[1][n]) for n in adapters[0])
    cfg = kit.ModelConfig(path=str(tmp_path / "reward"))
    mine, other = load_scalar_model(cfg, "reward"), AutoModel.from_pretrained(tmp_path / "local_reward")
    assert all(torch.equal(mine.backbone.state_dict()[n], w) for n, w in other.state_dict().items())
    assert (tmp_path / "reward" / "tutelage_head.json").read_text() == (
        tmp_path / "local_reward" / "tutelage_head.json"
    ).read_text()


def publish(rank: int, world: int, folder: Path, settings: dict) -> dict:
    engine = ranks_kit.policy(folder, SHARD, settings)
    engine.step(kit.batch(), kit.TokenLoss())
    lists = list(engine.weight_buckets(40_000))
    return {
        "named": {n: t.clone() for n, t in engine.named_weights()},
        "adapter": {n: t.clone() for n, t in engine.named_weights(adapter_only=True)},
        "buckets": [[(n, t.nbytes) for n, t in one] for one in lists],
    }


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}], ids=["full", "lora"])
def test_published_weights_are_the_exported_ones_and_the_tied_head(settings, tiny_llama_folder, tmp_path):
    engine = ranks_kit.policy(tiny_llama_folder, None, settings)
    engine.step(kit.batch(), kit.TokenLoss())
    engine.save_pretrained(tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    for one in run_ranks(publish, 2, tiny_llama_folder, settings):
        assert one["named"].keys() == exported.keys() | {"lm_head.weight"}
        assert torch.equal(one["named"]["lm_head.weight"], one["named"]["model.embed_tokens.weight"])
        for name, weight in exported.items():
            torch.testing.assert_close(one["named"][name], weight, atol=1e-4, rtol=0)
        for bucket in one["buckets"]:
            assert sum(size for _, size in bucket) <= 40_000 or len(bucket) == 1
        assert [n for bucket in one["buckets"] for n, _ in bucket] == list(one["named"])
        if settings:
            with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="pt") as adapter:
                assert one["adapter"].keys() == set(adapter.keys())
        else:
            assert one["adapter"] == {}
