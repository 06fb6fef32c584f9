"""Engines on tiny models, and the trainer they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.config.vllm import VLLMConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import installed
from tutelage.models.load import load_causal_lm
from tutelage.rollout.sampling import SamplingParams
from tutelage.rollout.vllm.engine import VLLMRollout, VLLMSpec
from tutelage.types import Prompts, Rollout

INSTALLED = installed("vllm")
ROWS = [[5, 9, 20], [7], [30, 31, 32, 33, 34, 35, 36, 37], [100, 5]]
SMALL = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 32, "start_timeout": 300.0}


def prompts_of(rows=ROWS, **kwargs) -> Prompts:
    return Prompts(
        tokens=tuple(tuple(r) for r in rows),
        ids=tuple(f"p{'-'.join(map(str, r))}" for r in rows),
        truths=tuple(range(len(rows))),
        messages=tuple(({"role": "user", "content": str(i)},) for i in range(len(rows))),
        **kwargs,
    )


def spec_of(folder: Path, tokenizer, *, config: dict | None = None, **changes) -> VLLMSpec:
    """seed 3, EOS 2, temperature 0.7, 12 new tokens unless said otherwise."""
    names = SamplingParams.__dataclass_fields__
    params = {"temperature": 0.7, "max_new_tokens": 12} | {k: changes.pop(k) for k in list(changes) if k in names}
    options = {"eos_ids": (2,), "seed": 3, **changes}
    return VLLMSpec(
        str(folder), tokenizer, params=SamplingParams(**params), config=VLLMConfig(**SMALL | (config or {})), **options
    )


@contextmanager
def running(spec: VLLMSpec, **options) -> Iterator[VLLMRollout]:
    engine = VLLMRollout(spec, **options)
    try:
        yield engine
    finally:
        engine.close()


def trainer_of(folder: Path, temperature: float = 0.7, **model) -> ModelEngine:
    policy = load_causal_lm(ModelConfig(path=str(folder), **model))
    return ModelEngine(policy, OptimConfig(lr=1e-2, schedule="constant"), temperature=temperature)


def weights_of(trainer: ModelEngine) -> dict[str, Tensor]:
    """By name, a tied parameter once."""
    return {name: p.detach() for name, p in trainer.model.module.named_parameters()}


def moved(trainer: ModelEngine, seed: int, size: float = 0.05) -> ModelEngine:
    """Every trainable weight moved: a logprob changes by far more than a tolerance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.module.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return trainer


def gap(trainer: ModelEngine, rollout: Rollout, temperature: float = 0.7) -> float:
    """Largest |trainer's logprob - sampler's logprob| over the response tokens."""
    ours = trainer.logprobs(rollout.sequences, temperature).flat
    assert ours.numel()
    return float((ours - rollout.rollout_logp.flat).abs().max())


def rows_of(rollout: Rollout):
    return list(zip(rollout.prompt_ids, rollout.samples.tolist(), rollout.sequences.response_rows(), strict=True))
