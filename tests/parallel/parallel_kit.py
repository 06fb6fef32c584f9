"""Tiny models with wide random weights, the same on every rank, and what one process says about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from tutelage.models.dropout import disable_dropout
from tutelage.models.forward import sequence_scores, token_logprobs, token_values, values_with_bootstrap
from tutelage.models.heads import ScalarModel, fresh_head
from tutelage.models.language_model import LanguageModel, backbone_of
from tutelage.models.lora import attach
from tutelage.models.parallel.tokens import TokenParallel
from tutelage.models.precision import MasterWeights
from tutelage.models.probe import choose_layout
from tutelage.types import Sequences

VOCAB = 96
MAKERS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM),
}

# inside a rank's share, across cuts, longer than a share, single tokens
UNEVEN = ((3, 4), (1, 6), (2, 17), (1, 1), (5, 2))
LONG = ((4, 27), (1, 1))
FEW = ((1, 1),)
EVEN = ((4, 12), (8, 8))
ROWS = {"uneven": UNEVEN, "long": LONG, "few": FEW, "even": EVEN}


def config(kind: str, **changes: object) -> Any:
    common = {
        "vocab_size": VOCAB,
        "initializer_range": 0.2,
        "pad_token_id": 2,
        "eos_token_id": 2,
        "bos_token_id": None,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    if kind == "bert":
        return BertConfig(**{**common, **changes})
    decoder = {"num_key_value_heads": 2, "head_dim": 16}
    return MAKERS[kind][0](**{**common, **decoder, **changes})


def build(kind: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cfg = config(kind, **changes)
        model = BertModel(cfg, add_pooling_layer=False) if kind == "bert" else MAKERS[kind][1](cfg)
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms start at 0 and 1; move them too
                if parameter.ndim < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return disable_dropout(model)


def language_model(kind: str = "llama", lora: int = 0, **changes: object) -> LanguageModel:
    model = build(kind, **changes)
    trunk = choose_layout(backbone_of(model))
    adapted = attach(model, lora, 2.0 * lora, 0) if lora else None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return LanguageModel(model, trunk, WordTokenizer(), MasterWeights(model, torch.float32), adapted)


def scalar_model(kind: str, role: str, pooling: str, lora: int = 0, **changes: object) -> ScalarModel:
    model = build(kind, **changes)
    trunk = choose_layout(model if kind == "bert" else backbone_of(model))
    adapted = attach(trunk.model, lora, 2.0 * lora, 0) if lora else None
    head = fresh_head("reward", 64, pooling, seed=3)
    scalar = ScalarModel(trunk, head.layers, role, pooling, tokenizer=WordTokenizer(), adapted=adapted)
    scalar.masters = MasterWeights(scalar, torch.float32)
    return scalar


def sequences(name: str, seed: int = 0) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCAB, (p + r,), generator=generator).tolist() for p, r in ROWS[name]]
    return Sequences.build(
        [row[:p] for row, (p, _) in zip(rows, ROWS[name], strict=True)],
        [row[p:] for row, (p, _) in zip(rows, ROWS[name], strict=True)],
    )


class WordTokenizer:
    def __len__(self) -> int:
        return VOCAB

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(VOCAB)}

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer_config.json").write_text("{}")

    def decode(self, ids: Iterable[int], **settings: bool) -> str:
        return " ".join(f"t{i}" for i in ids)

    def batch_decode(self, rows: Iterable[Iterable[int]], **settings: bool) -> list[str]:
        return [self.decode(row) for row in rows]


def over(model: Any, tokens: TokenParallel | None) -> Any:
    """The model with its rows cut."""
    model.trunk = replace(model.trunk, tokens=tokens)
    return model


def _weights(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def logprobs_of(model: LanguageModel, seqs: Sequences) -> tuple[dict[str, Tensor], Tensor]:
    """Numbers by name, and an objective of them."""
    logp_R, entropy_R = token_logprobs(model, seqs, 0.7, with_entropy=True)
    assert entropy_R is not None
    objective = (logp_R * _weights(len(logp_R), 1)).sum() + (entropy_R * _weights(len(logp_R), 2)).sum()
    return {"logp": logp_R.detach(), "entropy": entropy_R.detach()}, objective


def values_of(model: ScalarModel, seqs: Sequences) -> tuple[dict[str, Tensor], Tensor]:
    value_R, boot = token_values(model, seqs), values_with_bootstrap(model, seqs)
    objective = (value_R * _weights(len(value_R), 1)).sum() + (boot.flat * _weights(len(boot.flat), 2)).sum()
    return {"value": value_R.detach(), "bootstrap": boot.flat.detach()}, objective


def scores_of(model: ScalarModel, seqs: Sequences) -> tuple[dict[str, Tensor], Tensor]:
    score_B = sequence_scores(model, seqs)
    return {"score": score_B.detach()}, (score_B.square() * _weights(len(score_B), 1)).sum()


Work = Callable[[Any, Sequences], tuple[dict[str, Tensor], Tensor]]


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def run(model: Any, work: Work, seqs: Sequences, divide: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Numbers, and the gradient of the objective by every weight."""
    model.module.train()
    numbers, objective = work(model, seqs)
    (objective / divide).backward()
    grads = {n: whole(p.grad).clone() for n, p in model.module.named_parameters() if p.grad is not None}
    model.module.zero_grad()
    return numbers, grads


CASES: dict[str, tuple[Callable[[], Any], Work, str]] = {
    "gqa uneven": (lambda: language_model(), logprobs_of, "uneven"),
    "gqa long": (lambda: language_model(), logprobs_of, "long"),
    "gqa few": (lambda: language_model(), logprobs_of, "few"),
    "gqa even": (lambda: language_model(), logprobs_of, "even"),
    "one kv head, tied": (
        lambda: language_model(num_key_value_heads=1, tie_word_embeddings=True),
        logprobs_of,
        "uneven",
    ),
    "four kv heads": (lambda: language_model(num_key_value_heads=4), logprobs_of, "uneven"),
    "sliding window": (lambda: language_model("mistral", sliding_window=5), logprobs_of, "uneven"),
    "softcap": (
        lambda: language_model("gemma2", sliding_window=5, attn_logit_softcapping=3.0, query_pre_attn_scalar=16),
        logprobs_of,
        "uneven",
    ),
    "checkpointing": (lambda: checkpointing(language_model()), logprobs_of, "uneven"),
    "lora": (lambda: language_model(lora=3), logprobs_of, "uneven"),
    "value": (lambda: scalar_model("llama", "value", "last"), values_of, "uneven"),
    "last": (lambda: scalar_model("llama", "reward", "last"), scores_of, "uneven"),
    "mean": (lambda: scalar_model("llama", "reward", "mean"), scores_of, "uneven"),
    "response_mean": (lambda: scalar_model("llama", "reward", "response_mean"), scores_of, "uneven"),
    "encoder first": (lambda: scalar_model("bert", "reward", "first"), scores_of, "uneven"),
    "encoder mean": (lambda: scalar_model("bert", "reward", "mean"), scores_of, "long"),
}


def checkpointing(model: LanguageModel) -> LanguageModel:
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def require_equal(ours: tuple[dict[str, Tensor], dict[str, Tensor]], theirs: Any, what: str) -> None:
    """Numbers to 2e-5, gradients to 1e-5 of their norm: rounding of float32 in another order of sums."""
    assert ours[0].keys() == theirs[0].keys()
    for name, expected in theirs[0].items():
        torch.testing.assert_close(
            ours[0][name], expected, atol=2e-5, rtol=1e-5, msg=lambda m, n=name: f"{what} {n} {m}"
        )
    assert ours[1].keys() == theirs[1].keys(), what
    assert theirs[1]
    scale = max(float(g.norm()) for g in theirs[1].values())
    for name, expected in theirs[1].items():
        error = float((ours[1][name] - expected).norm())
        assert error <= 1e-5 * float(expected.norm()) + 3e-6 * scale, f"{what}: gradient of {name} off by {error}"
