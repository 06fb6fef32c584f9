"""An engine in each rank of a trainer that has a process group of its own."""

from __future__ import annotations

import pytest
import torch
from spmd_kit import run_ranks
from vllm_kit import gap, moved, prompts_of, rows_of, running, spec_of, trainer_of, weights_of

from tutelage.models.load import load_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = prompts_of(n=2, step=5)


def one_rank(rank, world, folder):
    """Each rank answers its half; the trainer's group works before, between and after."""
    trainer = moved(trainer_of(folder), 1)
    mine = PROMPTS.select([2 * rank, 2 * rank + 1])
    with running(spec_of(folder, load_tokenizer(str(folder)))) as engine:
        engine.load_weights(weights_of(trainer).items(), 1)
        rollout = engine.generate(mine)
        total = torch.tensor([float(rank + 1)])
        torch.distributed.all_reduce(total)
        assert total.item() == 3
    total = torch.tensor([float(rank + 1)])
    torch.distributed.all_reduce(total)
    assert total.item() == 3
    return gap(trainer, rollout), rows_of(rollout)


def test_two_ranks_together_sample_what_one_process_samples(tiny_llama_folder, tiny_tokenizer):
    parts = run_ranks(one_rank, 2, str(tiny_llama_folder), timeout=300)
    assert max(part[0] for part in parts) < 1e-5
    with running(spec_of(tiny_llama_folder, tiny_tokenizer)) as engine:
        engine.load_weights(weights_of(moved(trainer_of(tiny_llama_folder), 1)).items(), 1)
        assert parts[0][1] + parts[1][1] == rows_of(engine.generate(PROMPTS))
