"""Groups and pairs through an engine: prompts run once, and no number, gradient or order changes for it."""

from __future__ import annotations

from dataclasses import replace

import engine_kit as kit
import pytest
import torch
from torch import Tensor, nn

import tutelage.sharing
from tutelage.algorithms.sft import SFTLoss
from tutelage.models.forward import token_logprobs
from tutelage.types import Demonstrations, Pairs, Sequences

PROMPTS = [list(range(10, 19)), list(range(30, 41)), list(range(50, 60))]  # 9, 11 and 10 tokens
LENS = [3, 5, 1, 4, 2, 6, 2, 3, 7]


def group_batch() -> Demonstrations:
    """Three prompts, three answers to each, one after another: as a rollout of 3 samples in the order of samples."""
    generator = torch.Generator().manual_seed(0)
    answers = [torch.randint(0, 90, (n,), generator=generator).tolist() for n in LENS]
    return Demonstrations(Sequences.build(PROMPTS * 3, answers), tuple("abcdefghi"))


def pair_batch() -> Pairs:
    generator = torch.Generator().manual_seed(1)
    sides = [
        [torch.randint(0, 60, (n,), generator=generator).tolist() for n in lens] for lens in ((4, 2, 5), (3, 6, 1))
    ]
    chosen, rejected = (Sequences.build([[x - 5 for x in p] for p in PROMPTS], side) for side in sides)
    return Pairs(chosen, rejected, torch.zeros(3), tuple("abc"))


ONCE = 9 + 11 + 10 + sum(LENS)
APART = 3 * (9 + 11 + 10) + sum(LENS)


def tokens_run(model: nn.Module) -> list[int]:
    """Filled with the tokens that every forward embeds."""
    found: list[int] = []
    embeddings = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    embeddings.register_forward_hook(lambda _, inputs, __: found.append(inputs[0].numel()))
    return found


@pytest.fixture
def apart(monkeypatch):
    """Switches sharing off."""
    return lambda: monkeypatch.setattr(tutelage.sharing, "SHORTEST_PROMPT", 10**9)


@pytest.mark.parametrize("loss", [kit.TokenLoss(), kit.SortedLoss()], ids=["separable", "coupled"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_gradient_is_that_of_prompts_run_each_time_at_every_budget(
    loss, model, tiny_llama_folder, tiny_gpt2_folder, apart
):
    folder = tiny_llama_folder if model == "llama" else tiny_gpt2_folder
    engine, batch = kit.policy_engine(folder, temperature=0.7), group_batch()
    embedded = tokens_run(engine.model.module)
    passes = 2 if isinstance(loss, kit.SortedLoss) else 1
    found = {}
    for budget, parts, tokens in ((1, 9, APART), (24, 3, ONCE), (10_000, 1, ONCE)):
        engine.tokens_per_micro_batch = budget
        embedded.clear()
        found[budget] = engine.gradients(batch, loss)
        assert (len(embedded), sum(embedded)) == (parts * passes, tokens * passes), budget
        assert max(embedded) <= max(budget, 11 + 7)
    apart()
    embedded.clear()
    expected = engine.gradients(batch, loss)
    assert sum(embedded) == APART * passes
    for gradient in found.values():
        kit.require_close(gradient, expected, 2e-6)


def test_the_gradient_equals_plain_autograd_of_every_sequence_alone(tiny_llama_folder):
    engine, batch, loss = kit.policy_engine(tiny_llama_folder), group_batch(), kit.TokenLoss()
    ours = engine.gradients(batch, loss)
    rows = []
    for b in range(len(batch)):
        logp, entropy = token_logprobs(engine.model, batch.sequences.select(torch.tensor([b])), 1.0, True)
        rows.append(logp.square() + 0.1 * entropy)
    torch.cat(rows).mean().backward()
    theirs = {n: p.grad for n, p in engine.model.model.named_parameters()}
    kit.require_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("budget", [12, 25, 10_000])
def test_inference_returns_rows_in_their_order(budget, tiny_llama_folder, apart):
    batch = group_batch()
    policy = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=budget)
    critic = kit.scalar_engine(tiny_llama_folder, "value", tokens_per_micro_batch=budget)
    reward = kit.scalar_engine(tiny_llama_folder, "reward", tokens_per_micro_batch=budget)

    def everything() -> list[Tensor]:
        seqs = batch.sequences
        top = policy.top_logprobs(seqs, 2, 1.0)
        flats = [policy.logprobs(seqs, 1.0), policy.log_collisions(seqs, 1.0), top[0], top[2], critic.values(seqs)]
        return [*(x.flat for x in flats), reward.scores(seqs), reward.token_scores(seqs).flat]

    together = everything()
    apart()
    for ours, theirs in zip(together, everything(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("budget", [1, 22, 10_000])
def test_the_sides_of_a_pair_share_their_prompt(budget, tiny_llama_folder, apart):
    pairs = pair_batch()
    engine = kit.scalar_engine(tiny_llama_folder, "reward", tokens_per_micro_batch=budget)
    embedded = tokens_run(engine.model.module)
    ours = engine.gradients(pairs, kit.PairLoss())
    assert sum(embedded) == 9 + 11 + 10 + 21
    assert len(embedded) == (1 if budget == 10_000 else 3)
    apart()
    kit.require_close(engine.gradients(pairs, kit.PairLoss()), ours, 2e-6)


def test_an_update_counts_micro_batches_of_shared_tokens_and_repeats_to_the_bit(tiny_llama_folder):
    found = []
    for _ in range(2):
        engine = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=24)
        stats = engine.step(group_batch(), kit.TokenLoss())
        assert stats["micro_batches"].mean == 3
        found.append(engine.state()["weights"])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("settings", [{"lora_rank": 2}, {"gradient_checkpointing": True}], ids=["lora", "checkpointed"])
def test_adapters_and_checkpointed_blocks_share_too(settings, tiny_llama_folder, apart):
    engine = kit.policy_engine(tiny_llama_folder, settings)
    embedded = tokens_run(engine.model.module)
    ours = engine.gradients(group_batch(), kit.TokenLoss())
    assert sum(embedded) == ONCE
    apart()
    kit.require_close(ours, engine.gradients(group_batch(), kit.TokenLoss()), 2e-6)


def test_gradients_are_the_same_bits_on_several_threads(tiny_llama_folder):
    """Many responses read one state, so many gradients meet there: enough of them for torch to use its threads."""
    generator = torch.Generator().manual_seed(2)
    answers = [torch.randint(0, 90, (60,), generator=generator).tolist() for _ in range(24)]
    sequences = Sequences.build([list(range(10, 22))] * 24, answers)
    trunk = kit.policy_engine(tiny_llama_folder).model.trunk
    states = trunk.shared_states(sequences)
    wide = replace(states, hidden=states.hidden.detach().repeat(1, 8).requires_grad_())
    index = sequences.response_index() - 1
    assert index.shape[0] * wide.hidden.shape[1] > 2**18
    weight = torch.randn(index.shape[0], wide.hidden.shape[1], generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = []
        for _ in range(30):
            read = wide.read(index, lambda hidden, _: hidden)
            whole = wide.sums(torch.arange(24 * 72), torch.arange(24).repeat_interleave(72), 24)
            loss = (read * weight).sum() + (whole * whole).sum()
            found.append(torch.autograd.grad(loss, wide.hidden)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found)


def test_noise_is_each_sequences_own_so_nothing_is_shared_while_it_trains(tiny_llama_folder, apart):
    batch, noisy = group_batch(), SFTLoss("token_mean", "nll", 5.0, seed=3, step=7)
    engine = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=40)
    embedded = tokens_run(engine.model.module)
    ours = engine.gradients(batch, noisy)
    assert sum(embedded) == APART
    embedded.clear()
    engine.evaluate(batch, noisy)
    engine.gradients(batch, replace(noisy, noise_alpha=None))
    assert sum(embedded) == 2 * ONCE
    apart()
    kit.require_close(ours, engine.gradients(batch, noisy), 1e-6)


def test_encoders_compute_every_sequence_whole(tiny_bert_folder, apart):
    engine = kit.scalar_engine(tiny_bert_folder, "reward", tokens_per_micro_batch=30)
    embedded = tokens_run(engine.model.module)
    ours = engine.gradients(pair_batch(), kit.PairLoss())
    assert sum(embedded) == 2 * (9 + 11 + 10) + 21
    parts = list(embedded)
    embedded.clear()
    apart()
    kit.require_close(ours, engine.gradients(pair_batch(), kit.PairLoss()), 1e-6)
    assert embedded == parts
