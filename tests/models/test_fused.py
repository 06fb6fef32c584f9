"""SwiGLU and RMSNorm that keep less for the backward pass, beside transformers' modules and sums in float64."""

from __future__ import annotations

import copy
from typing import Any

import model_kit as kit
import pytest
import torch
from native_kit import needs_compiler
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NanoChatConfig,
    OlmoConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.mixtral.modeling_mixtral import MixtralAttention, MixtralRMSNorm
from transformers.models.nanochat.modeling_nanochat import NanoChatAttention
from transformers.models.olmo.modeling_olmo import OlmoAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm

from tutelage.config.common import ModelConfig
from tutelage.models import fused
from tutelage.models.forward import token_logprobs
from tutelage.models.language_model import backbone_of
from tutelage.models.load import load_causal_lm
from tutelage.models.trunk import Trunk
from tutelage.native import ops

EPS = 1e-3
QWEN3: dict[str, Any] = {
    "vocab_size": kit.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.2,
    "pad_token_id": 2,
    "eos_token_id": 2,
    "bos_token_id": None,
    "max_position_embeddings": 64,
}
SHAPES = [(7, 24), (2, 5, 24), (1, 24)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(salt)
    return torch.randn(*shape, dtype=torch.float64, generator=random).to(dtype).requires_grad_(True)


def swiglu_by_hand(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt()


CASES: list[Any] = [
    pytest.param(fused.swiglu, swiglu_by_hand, lambda shape: [shape, shape], id="swiglu"),
    pytest.param(lambda x, w: fused.rms_norm(x, w, EPS), norm_by_hand, lambda shape: [shape, shape[-1:]], id="norm"),
]


@pytest.mark.parametrize(("ours", "by_hand", "shapes"), CASES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-6)])
def test_values_and_gradients_are_those_of_the_equations(ours, by_hand, shapes, shape, dtype, bound) -> None:
    inputs = [drawn(*s, dtype=dtype, salt=i) for i, s in enumerate(shapes(shape))]
    exact = [x.detach().double().requires_grad_(True) for x in inputs]
    by = drawn(*shape, dtype=dtype, salt=9).detach()
    found, expected = ours(*inputs), by_hand(*exact)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    pairs = [(found, expected)]
    pairs += zip(torch.autograd.grad(found, inputs, by), torch.autograd.grad(expected, exact, by.double()), strict=True)
    for got, right in pairs:
        assert got.dtype == dtype
        assert float((got.detach().double() - right.detach()).norm() / right.detach().norm()) < bound
    with torch.no_grad():
        assert torch.equal(ours(*inputs), found)


@pytest.mark.parametrize(("ours", "by_hand", "shapes"), CASES)
def test_only_what_is_trained_gets_a_gradient(ours, by_hand, shapes) -> None:
    for trained in (0, 1):
        inputs = [drawn(*s, salt=i).requires_grad_(i == trained) for i, s in enumerate(shapes((7, 24)))]
        exact = [x.detach().double().requires_grad_(i == trained) for i, x in enumerate(inputs)]
        ours(*inputs).square().sum().backward()
        by_hand(*exact).square().sum().backward()
        assert inputs[1 - trained].grad is None
        torch.testing.assert_close(inputs[trained].grad.double(), exact[trained].grad, rtol=1e-4, atol=1e-5)


def kept_bytes(compute: Any) -> int:
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        compute()
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_keeps_the_inputs_alone(dtype: torch.dtype) -> None:
    gate, up, x, weight = (drawn(50, 24, dtype=dtype, salt=i) for i in range(4))
    weight = weight[0].detach().clone().requires_grad_(True)
    whole = 50 * 24 * gate.element_size()
    assert kept_bytes(lambda: fused.swiglu(gate, up)) == 2 * whole
    assert kept_bytes(lambda: nn.functional.silu(gate) * up) == 3 * whole
    norm = LlamaRMSNorm(24, EPS)
    norm.weight = nn.Parameter(weight.detach().clone())
    few = 50 * 4 + weight.numel() * weight.element_size()
    assert kept_bytes(lambda: fused.rms_norm(x, weight, EPS)) == whole + few
    assert kept_bytes(lambda: norm(x)) >= 2 * whole


def test_a_tensor_of_another_class_is_left_to_its_own_operators() -> None:
    """Such as one that a mesh of ranks holds."""

    class Marked(Tensor):
        pass

    plain, marked = drawn(7, 24), drawn(7, 24).as_subclass(Marked)
    for compute, name in ((lambda x: fused.swiglu(x, x), "Swiglu"), (lambda x: fused.rms_norm(x, x[0], EPS), "Norm")):
        assert name in compute(plain).grad_fn.name()
        assert name not in compute(marked).grad_fn.name()
        assert type(compute(marked)) is Marked


# --- in a model -------------------------------------------------------------------------------------------------------


def one_of_each() -> nn.ModuleDict:
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
    return nn.ModuleDict(
        {
            "llama mlp": LlamaMLP(kit.build("llama").config),
            "qwen mlp": Qwen3MLP(Qwen3Config(**sizes)),
            "llama norm": LlamaRMSNorm(24),
            "qwen norm": Qwen3RMSNorm(24),
            "mixtral norm": MixtralRMSNorm(MixtralConfig().hidden_size),
            "gelu mlp": GemmaMLP(GemmaConfig(**sizes, hidden_activation="gelu_pytorch_tanh")),
            "norm plus one": GemmaRMSNorm(Gemma2Config(**sizes).hidden_size),
            "layer norm": nn.LayerNorm(24),
            "llama attention": LlamaAttention(LlamaConfig(**sizes, **heads), 0),
            "qwen2 attention": Qwen2Attention(Qwen2Config(**sizes, **heads), 0),
            "qwen3 attention": Qwen3Attention(Qwen3Config(**sizes, **heads), 0),
            "mistral attention": MistralAttention(MistralConfig(**sizes, **heads), 0),
            "mixtral attention": MixtralAttention(MixtralConfig(**sizes, **heads), 0),
            "rounded attention": OlmoAttention(OlmoConfig(**sizes, **heads), 0),
            "backward attention": NanoChatAttention(NanoChatConfig(**sizes, **heads), 0),
            "unturned attention": GPT2Attention(GPT2Config(n_embd=24, n_head=2)),
        }
    )


def test_which_modules_are_fused() -> None:
    modules = one_of_each()
    fused.fuse(modules)
    found = {name for name, module in modules.items() if "forward" in vars(module)}
    attentions = {f"{name} attention" for name in ("llama", "qwen2", "qwen3", "mistral", "mixtral")}
    assert found == {"llama mlp", "qwen mlp", "llama norm", "qwen norm", "mixtral norm", *attentions}
    before = {name: vars(modules[name])["forward"] for name in found}
    fused.fuse(modules)
    assert all(vars(modules[name])["forward"] is before[name] for name in found)


def test_the_forward_pass_of_transformers_is_the_one_that_was_read() -> None:
    """Where transformers changes it, no block is fused, and this says so."""
    assert LlamaMLP.forward.__code__.co_names == fused.MLP_NAMES
    assert LlamaRMSNorm.forward.__code__.co_names == fused.NORM_NAMES


@pytest.mark.parametrize("known", ["MLP_NAMES", "NORM_NAMES"])
def test_another_forward_pass_is_left_alone(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, known, ("something", "else"))
    modules = one_of_each()
    fused.fuse(modules)
    kinds = {name.split()[-1] for name, module in modules.items() if "forward" in vars(module)}
    assert kinds == {"attention", "norm" if known == "MLP_NAMES" else "mlp"}


def test_an_attention_with_another_rotary_embedding_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fused._with_rotary.cache_clear()
    monkeypatch.setattr(modeling_llama, fused.ROTARY, lambda q, k, cos, sin: (q, k))
    modules = one_of_each()
    fused.fuse(modules)
    found = {name for name, module in modules.items() if "forward" in vars(module)}
    fused._with_rotary.cache_clear()
    assert "llama attention" not in found
    assert "mistral attention" in found


@needs_compiler
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_bfloat16_a_model_trains_as_with_transformers_own_operators(tmp_path, monkeypatch, kind: str) -> None:
    """Both are as far from float32 as the rounding of bfloat16 takes them, and no further."""
    wide = kit.build("llama") if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**QWEN3))
    wide.save_pretrained(tmp_path)
    seqs, runs = kit.sequences(), {}
    for run, dtype in (("exact", "float32"), ("kernels", "bfloat16"), ("torch", "bfloat16")):
        calls: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                ops, "_call", lambda name, *rest, calls=calls, call=ops._call: calls.append(name) or call(name, *rest)
            )
            if run == "torch":
                patch.setattr(ops, "takes", lambda *tensors: False)
            model = load_causal_lm(ModelConfig(path=str(tmp_path), dtype=dtype), kit.WordTokenizer())
            logp, _ = token_logprobs(model, seqs)
            logp.sum().backward()
        grads = torch.cat([p.grad.double().flatten() for p in model.masters.masters.values() if p.grad is not None])
        runs[run] = (logp.detach().double(), grads)
        every = {"rms_norm", "rms_norm_back", "swiglu", "swiglu_back", "rotary"}
        assert set(calls) == (every if run == "kernels" else set())
    for found, other, exact in zip(runs["kernels"], runs["torch"], runs["exact"], strict=True):
        off, usual = float((found - exact).norm() / exact.norm()), float((other - exact).norm() / exact.norm())
        assert 0 < off < 1.3 * usual < 0.1


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_computes_what_transformers_does(tmp_path, lora: bool) -> None:
    """Hidden states to the bit, every gradient within the rounding of float32."""
    kit.build("llama").save_pretrained(tmp_path)
    cfg = ModelConfig(path=str(tmp_path), lora_rank=4 if lora else 0)
    model = load_causal_lm(cfg, kit.WordTokenizer())
    blocks = [m for m in model.module.modules() if "forward" in vars(m)]
    assert len(blocks) == 2 * 4 + 1  # attention, two norms and a gated block each, and the last norm
    seqs, results = kit.sequences(), []
    for plain in (False, True):
        if plain:
            for module in blocks:
                del module.forward
        model.module.zero_grad()
        logp, _ = token_logprobs(model, seqs)
        logp.square().sum().backward()
        grads = {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}
        results.append((logp.detach(), grads))
    (logp, grads), (expected_logp, expected) = results
    assert torch.equal(logp, expected_logp)
    assert grads
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max()))


def test_a_copy_computes_with_its_own_weights() -> None:
    model = kit.build("llama")
    Trunk(backbone_of(model.eval()))
    other = copy.deepcopy(model)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        before = model(ids).logits.clone()
        for module in other.modules():
            if isinstance(module, LlamaRMSNorm):
                module.weight.zero_()
        assert not other(ids).logits.any()
        assert torch.equal(model(ids).logits, before)
