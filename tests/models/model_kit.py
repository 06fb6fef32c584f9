"""Tiny models with wide random weights, and what transformers itself computes for one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tutelage.types import Sequences

VOCAB = 90
DECODERS = ("llama", "gpt2")
ENCODERS = ("bert", "distilbert")


def build(kind: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Two layers, width 64, head size 32; dropout at the architecture's default."""
    common = {"vocab_size": VOCAB, "initializer_range": 0.2, "pad_token_id": 2, "eos_token_id": 2}
    makers: dict[str, Callable[[], PreTrainedModel]] = {
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(
                **{
                    **common,
                    "hidden_size": 64,
                    "intermediate_size": 96,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 32,
                    "max_position_embeddings": 64,
                    "attention_dropout": 0.1,
                    "bos_token_id": None,
                    **changes,
                }
            )
        ),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(**{**common, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, **changes})
        ),
        "bert": lambda: BertModel(
            BertConfig(
                **{
                    **common,
                    "hidden_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "intermediate_size": 96,
                    "max_position_embeddings": 64,
                    **changes,
                }
            ),
            add_pooling_layer=False,
        ),
        "distilbert": lambda: DistilBertModel(
            DistilBertConfig(
                **{
                    **common,
                    "dim": 64,
                    "n_layers": 2,
                    "n_heads": 2,
                    "hidden_dim": 96,
                    "max_position_embeddings": 64,
                    **changes,
                }
            )
        ),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = makers[kind]()
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms start at 0 and 1; move them too
                if parameter.ndim < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def sequences(seed: int = 0, lens: tuple[tuple[int, int], ...] = ((3, 4), (1, 6), (7, 1), (2, 9), (5, 2))) -> Sequences:
    """Random prompts and responses of these lengths; some tokens equal pad = eos = 2."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCAB, (p + r,), generator=generator).tolist() for p, r in lens]
    for row in rows:
        row[-1] = 2
    return Sequences.build(
        [row[:p] for row, (p, _) in zip(rows, lens, strict=True)],
        [row[p:] for row, (p, _) in zip(rows, lens, strict=True)],
    )


def native(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under transformers' own eager attention, dropout off by eval()."""
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = "eager"
    extra = {"add_pooling_layer": False} if isinstance(model, BertModel) else {}
    twin = type(model)(config, **extra)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def native_logprobs(model: PreTrainedModel, seqs: Sequences, temperature: float) -> list[Tensor]:
    """Per sequence: log softmax(logits / temperature) of its response tokens, from all logits of that row alone."""
    twin = native(model)
    rows = []
    for row, prompt in zip(seqs.tokens.rows(), seqs.prompt_lens.tolist(), strict=True):
        logp = torch.log_softmax(twin(input_ids=row[None]).logits[0] / temperature, dim=-1)
        rows.append(torch.stack([logp[t - 1, row[t]] for t in range(prompt, len(row))]))
    return rows


def native_hidden(model: PreTrainedModel, seqs: Sequences) -> list[Tensor]:
    twin = native(model)
    return [twin(input_ids=row[None]).last_hidden_state[0] for row in seqs.tokens.rows()]


class WordTokenizer:
    """The smallest thing that saving needs of a tokenizer."""

    def __init__(self, size: int = VOCAB) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(self.size)}

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer_config.json").write_text("{}")
