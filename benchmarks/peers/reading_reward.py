"""An encoder as reward model of TRL's PPO, which asks a reward model for hidden states of the policy's own tokens.

The tokens are decoded and read through the encoder's tokenizer; its score stands at every position.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class Reader(nn.Module):
    def __init__(self, path: str, policy_tokenizer: Any) -> None:
        super().__init__()
        self.encoder = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="sdpa")
        self.own, self.policy = AutoTokenizer.from_pretrained(path), policy_tokenizer
        self.longest = self.encoder.config.max_position_embeddings

    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Tensor, **rest: Any) -> Any:
        rows = [row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask, strict=True)]
        texts = self.policy.batch_decode(rows, skip_special_tokens=True)
        inputs = self.own(texts, return_tensors="pt", padding=True, truncation=True, max_length=self.longest)
        score_B = self.encoder(**{k: v.to(input_ids.device) for k, v in inputs.items()}).logits[:, 0]
        return SimpleNamespace(hidden_states=(score_B[:, None, None].expand(*input_ids.shape, 1),))


class ReadingReward(nn.Module):
    """As TRL reads one: `base_model_prefix` names the part that gives hidden states, `score` makes rewards of them."""

    base_model_prefix = "reader"

    def __init__(self, path: str, policy_tokenizer: Any, pad_id: int) -> None:
        super().__init__()
        self.reader = Reader(path, policy_tokenizer)
        self.score = nn.Identity()
        self.config = SimpleNamespace(pad_token_id=pad_id)
