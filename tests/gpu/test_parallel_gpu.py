"""Cut rows and matrices on accelerators: FlashAttention over pieces, and NCCL groups. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from spmd_kit import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from tutelage.models.attention import _attend_pieces
from tutelage.models.forward import token_logprobs
from tutelage.models.language_model import LanguageModel, backbone_of
from tutelage.models.parallel.tensor import tensor_parallel
from tutelage.models.parallel.tokens import Pieces, TokenParallel
from tutelage.models.precision import MasterWeights
from tutelage.models.probe import choose_layout
from tutelage.models.trunk import Trunk
from tutelage.types import Sequences

GPUS = torch.cuda.device_count()
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")


@one_gpu
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
def test_pieces_through_flash_attention_equal_masks_in_float32(causal, window):
    """Queries 3..7 and 20..26 of segments that begin at 0 and 15: pieces that do not start with their segment."""
    lens, offsets = (5, 7), (3, 5)
    keys = (8, 12) if causal else (11, 20)
    pieces = Pieces(lens, keys, offsets, None)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, sum(lens), 64), (1, 2, sum(keys), 64), (1, 2, sum(keys), 64))
    wide = [torch.randn(shape, generator=generator).bfloat16().float().requires_grad_() for shape in shapes]
    narrow = [x.detach().cuda().bfloat16().requires_grad_() for x in wide]
    expected = _attend_pieces(*wide, pieces, 0.125, causal, window, None)
    found = _attend_pieces(*narrow, pieces, 0.125, causal, window, None)
    torch.testing.assert_close(found.float().cpu(), expected, atol=3e-2, rtol=3e-2)
    expected.sum().backward()
    found.sum().backward()
    for a, b in zip(narrow, wide, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad.float().cpu(), b.grad, atol=6e-2, rtol=6e-2)


def policy(device: str) -> LanguageModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(device)  # type: ignore[arg-type]
    return LanguageModel(model, choose_layout(backbone_of(model)), None, MasterWeights(model, torch.float32))  # type: ignore[arg-type]


def rows() -> Sequences:
    generator = torch.Generator().manual_seed(1)
    lens = ((3, 9), (1, 6), (8, 23))
    cut = [torch.randint(0, 128, (p + r,), generator=generator).tolist() for p, r in lens]
    return Sequences.build(
        [row[:p] for row, (p, _) in zip(cut, lens, strict=True)],
        [row[p:] for row, (p, _) in zip(cut, lens, strict=True)],
    )


def objective(model: LanguageModel, share: float) -> tuple[Tensor, dict[str, Tensor]]:
    logp_R = token_logprobs(model, rows(), 0.9)[0]
    (logp_R.square().mean() * share).backward()
    grads = {n: p.grad for n, p in model.model.named_parameters() if p.grad is not None}
    return logp_R.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


def on_gpus(rank: int, world: int, form: str) -> Any:
    torch.cuda.set_device(rank)
    group = dist.new_group(list(range(world)), backend="nccl")
    model = policy(f"cuda:{rank}")
    if form == "tensor":
        tensor_parallel(model, DeviceMesh.from_group(group, "cuda"))
        logp_R, grads = objective(model, 1.0)
    else:
        tokens = TokenParallel(sequence=group) if form == "sequence" else TokenParallel(group, None, form == "ring")
        model.trunk = Trunk(model.trunk.model, model.trunk.layout, model.trunk.causal, tokens)
        logp_R, grads = objective(model, 1 / world)
        for grad in grads.values():
            dist.all_reduce(grad, group=group)
    return logp_R.cpu(), {name: grad.cpu() for name, grad in grads.items()}


@two_gpus
@pytest.mark.parametrize("form", ["sequence", "context", "ring", "tensor"])
def test_two_gpus_equal_one_process_in_float32(form):
    logp_R, grads = objective(policy("cpu"), 1.0)
    for found_R, found in run_ranks(on_gpus, 2, form):
        torch.testing.assert_close(found_R, logp_R, atol=1e-4, rtol=0)
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            assert float((found[name] - grad).norm()) <= 1e-3 * float(grad.norm()) + 1e-6, name
