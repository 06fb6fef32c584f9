"""Models built from a configuration, and functions run by one process for each CUDA device."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tutelage.algorithms.sft import SFTLoss
from tutelage.engines.engine import ModelEngine
from tutelage.types import Demonstrations, Sequences

VOCABULARY = 512
BF16 = 0.02
"""Relative difference of a loss in bfloat16."""


def model_folder(folder: Path) -> Path:
    """A Llama of 4 blocks, width 256, with tied embeddings, and a tokenizer of as many words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0", eos_token="w2"
    ).save_pretrained(folder)
    return folder


def batch() -> Demonstrations:
    generator = torch.Generator().manual_seed(1)
    lens = [(5, 40), (17, 60), (3, 9), (30, 80), (8, 20), (12, 55), (4, 33), (25, 70)]
    rows = [torch.randint(0, VOCABULARY, (p + r,), generator=generator).tolist() for p, r in lens]
    seqs = Sequences.build(
        [row[:p] for row, (p, _) in zip(rows, lens, strict=True)],
        [row[p:] for row, (p, _) in zip(rows, lens, strict=True)],
    )
    return Demonstrations(seqs, tuple(str(i) for i in range(len(rows))))


def losses_of(engine: ModelEngine, steps: int) -> list[float]:
    return [engine.step(batch(), SFTLoss("token_mean"))["loss"].mean for _ in range(steps)]


def _rank(rank: int, function: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    home = Path(folder)
    try:
        torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",  # gloo sums what an offload keeps in the host's memory
            init_method=f"file://{home / 'store'}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=120),
        )
        torch.save(function(rank, world, *args), home / f"result_{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (home / f"error_{rank}.txt").write_text(traceback.format_exc())
        raise


def run_on_devices(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """function(rank, world, *args) in one process a device; module-level, arguments and results picklable."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_rank, (function, world, folder, args), nprocs=world)
        except Exception as error:
            texts = [path.read_text() for path in sorted(Path(folder).glob("error_*.txt"))]
            raise AssertionError("\n".join(texts) or str(error)) from error
        return [torch.load(Path(folder) / f"result_{r}.pt", weights_only=False) for r in range(world)]
