"""Sharded engines on an accelerator: one device and NCCL, several where there are; models from a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_kit import BF16, batch, losses_of, model_folder, run_on_devices

from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import MeshRanks
from tutelage.layout import Layout
from tutelage.models.load import load_causal_lm
from tutelage.models.sharding import Sharding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama"))


def alone(folder: Path, dtype: str = "float32", steps: int = 3) -> list[float]:
    """The losses of one process on the device."""
    model = load_causal_lm(ModelConfig(path=str(folder), dtype=dtype), device="cuda")
    return losses_of(ModelEngine(model, OptimConfig(lr=1e-3, schedule="constant")), steps)


def sharded(rank: int, world: int, folder: Path, shape: dict, dtype: str, offload: bool) -> dict:
    device = torch.device("cuda", rank)
    ranks = MeshRanks(RankMeshes().of(Layout(**shape), device), offload=offload)
    sharding = ranks.sharding()
    if sharding is None and world == 1:  # FSDP over a mesh of one
        sharding = Sharding(ranks.mesh.fsdp(), ranks.mesh.everyone, device, ranks.agree)
    cfg = ModelConfig(path=str(folder), dtype=dtype, gradient_checkpointing=True)
    model = load_causal_lm(cfg, sharding=sharding, device=str(device))
    engine = ModelEngine(model, OptimConfig(lr=1e-3, schedule="constant", tokens_per_micro_batch=200), ranks=ranks)
    torch.cuda.reset_peak_memory_stats(device)
    losses = losses_of(engine, 3)
    masters = list(engine.model.masters.masters.values())
    with torch.no_grad(), engine.forward_context():
        cut = torch.tensor([0, 4], dtype=torch.int32, device=device)
        tokens = torch.tensor([[5, 6, 7, 8]], device=device)
        logits = engine.model.model(input_ids=tokens, cu_seq_lens_q=cut, use_cache=False).logits
    return {
        "losses": losses,
        "homes": sorted({m.device.type for m in masters}),
        "types": sorted({str(m.dtype) for m in masters}),
        "gathered": str(logits.dtype),
        "finite": bool(logits.isfinite().all()),
    }


@pytest.mark.parametrize("offload", [False, True], ids=["on_the_device", "offloaded"])
def test_one_device_sharded_over_itself_equals_the_plain_engine(folder, offload):
    (found,) = run_on_devices(sharded, 1, folder, {}, "float32", offload)
    assert found["losses"] == pytest.approx(alone(folder), rel=1e-4)
    assert found["homes"] == (["cpu"] if offload else ["cuda"])
    assert found["finite"]


@pytest.mark.parametrize("offload", [False, True], ids=["on_the_device", "offloaded"])
def test_bfloat16_keeps_float32_masters(folder, offload):
    (found,) = run_on_devices(sharded, 1, folder, {}, "bfloat16", offload)
    assert found["losses"] == pytest.approx(alone(folder), rel=BF16)
    assert found["types"] == ["torch.float32"]
    assert found["gathered"] == "torch.bfloat16"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("shape", [{"replicate": 2}, {"shard": 2}], ids=["replicas", "shards"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_devices_over_nccl_equal_one(folder, shape, dtype):
    found = run_on_devices(sharded, 2, folder, shape, dtype, False)
    expected = alone(folder)
    for one in found:
        assert one["losses"] == pytest.approx(expected, rel=1e-4 if dtype == "float32" else BF16)
    assert found[0]["losses"] == found[1]["losses"]


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four CUDA devices")
def test_replicated_shards_over_nccl_equal_one(folder):
    found = run_on_devices(sharded, 4, folder, {"replicate": 2, "shard": 2}, "float32", False)
    assert all(one["losses"] == pytest.approx(alone(folder), rel=1e-4) for one in found)


def test_the_batch_is_cut_into_several_micro_batches():
    assert int(batch().item_tokens().sum()) > 400
