"""Rollouts made by hand."""

from __future__ import annotations

import torch

from tutelage.types import Ragged, Rollout, Sequences


def make_rollout(prompts, responses, texts, truths=None, messages=None) -> Rollout:
    """Token rows, texts and truths as given; every prompt has one sample."""
    count = len(texts)
    sequences = Sequences.build(prompts, responses)
    return Rollout(
        sequences=sequences,
        rollout_logp=Ragged(torch.zeros(int(sequences.response_lens.sum())), sequences.response_lens),
        finished=torch.ones(count, dtype=torch.bool),
        prompt_ids=tuple(f"id{i}" for i in range(count)),
        samples=torch.zeros(count, dtype=torch.int64),
        group=torch.arange(count),
        truths=tuple(truths or [None] * count),
        messages=tuple(messages or [({"role": "user", "content": f"question {i}"},) for i in range(count)]),
        texts=tuple(texts),
        weights_version=torch.zeros(count, dtype=torch.int64),
    )


def text_rollout(*texts: str, **kwargs) -> Rollout:
    return make_rollout([[1]] * len(texts), [[2]] * len(texts), texts, **kwargs)
