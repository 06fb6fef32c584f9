"""Tiny models with random weights, prompts and engines for the rollout tests."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tutelage.models.attention import register
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Prompts

VOCAB = 259
PROMPTS = [[5, 9, 100], [7], [30, 31, 32, 33, 34, 35, 36, 37], [200, 5]]


def make_model(kind: str, seed: int = 0, implementation: str = "tutelage", spread: float = 0.15):
    """Random weights, wide enough for distributions that are far from flat."""
    register()
    torch.manual_seed(seed)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=64,
            initializer_range=spread,
            attn_implementation=implementation,
            eos_token_id=256,
        )
        return LlamaForCausalLM(config)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=spread,
        attn_implementation=implementation,
        eos_token_id=256,
    )
    return GPT2LMHeadModel(config)


def plain_twin(model):
    """The same weights under transformers' own sdpa attention."""
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = "sdpa"
    twin = type(model)(config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def make_prompts(rows, **kwargs) -> Prompts:
    count = len(rows)
    return Prompts(
        tokens=tuple(tuple(r) for r in rows),
        ids=tuple(f"p{'-'.join(map(str, r))}" for r in rows),
        truths=tuple(range(count)),
        messages=tuple(({"role": "user", "content": str(i)},) for i in range(count)),
        **kwargs,
    )


def make_engine(model, tokenizer, **kwargs) -> InProcessRollout:
    """seed 3, EOS 256, temperature 0.7, 12 new tokens unless said otherwise."""
    names = SamplingParams.__dataclass_fields__
    params = {"temperature": 0.7, "max_new_tokens": 12} | {k: kwargs.pop(k) for k in list(kwargs) if k in names}
    options = {"seed": 3} | kwargs
    return InProcessRollout(model, tokenizer, options.pop("eos_ids", (256,)), SamplingParams(**params), **options)


def rows_of(rollout):
    """(prompt id, sample, response tokens) of each row."""
    return list(zip(rollout.prompt_ids, rollout.samples.tolist(), rollout.sequences.response_rows(), strict=True))
