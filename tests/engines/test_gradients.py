"""The gradient does not depend on how the work was cut, and equals a plain autograd of the whole."""

from __future__ import annotations

import itertools

import engine_kit as kit
import pytest
import torch

from tutelage.errors import ShapeError, TrainingError
from tutelage.models.forward import token_logprobs
from tutelage.types import Ragged

BUDGETS = (1, 12, 30, 10_000)


@pytest.mark.parametrize("loss", [kit.TokenLoss(), kit.SortedLoss()], ids=["separable", "coupled"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_gradient_is_the_same_for_every_micro_batch_size(loss, model, tiny_llama_folder, tiny_gpt2_folder):
    folder = tiny_llama_folder if model == "llama" else tiny_gpt2_folder
    engine, batch = kit.policy_engine(folder, temperature=0.7), kit.batch()
    found = {}
    for budget in BUDGETS:
        engine.tokens_per_micro_batch = budget
        found[budget] = engine.gradients(batch, loss)
    for budget in BUDGETS[:-1]:
        kit.require_close(found[budget], found[10_000], 1e-6)


@pytest.mark.parametrize("loss", [kit.TokenLoss(), kit.SortedLoss()], ids=["separable", "coupled"])
def test_the_gradient_is_the_same_in_every_item_order(loss, tiny_llama_folder):
    engine, batch = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=20), kit.batch()
    shuffled = batch.select(torch.tensor([5, 0, 7, 3, 1, 6, 2, 4]))
    kit.require_close(engine.gradients(shuffled, loss), engine.gradients(batch, loss), 1e-6)


def test_one_micro_batch_of_eight_equals_eight_of_one(tiny_llama_folder):
    batch, losses = kit.batch(), []
    for budget, parts in ((10_000, 1), (1, 8)):
        engine = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=budget)
        stats = engine.step(batch, kit.TokenLoss())
        assert stats["micro_batches"].mean == parts
        losses.append(stats)
    for name in ("loss", "grad_norm", "logp"):
        assert losses[0][name].mean == pytest.approx(losses[1][name].mean, rel=1e-6)


def test_a_separable_gradient_equals_plain_autograd_in_one_graph(tiny_llama_folder):
    engine, batch, loss = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=12), kit.batch(), kit.TokenLoss()
    ours = engine.gradients(batch, loss)
    rows = []
    for b in range(len(batch)):
        logp, entropy = token_logprobs(engine.model, batch.sequences.select(torch.tensor([b])), 1.0, True)
        rows.append(logp.square() + 0.1 * entropy)
    torch.cat(rows).mean().backward()
    theirs = {n: p.grad for n, p in engine.model.model.named_parameters()}
    kit.require_close(ours, theirs, 1e-6)


def test_a_coupled_gradient_equals_plain_autograd_in_one_graph(tiny_llama_folder):
    engine, batch = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=12), kit.batch()
    ours = engine.gradients(batch, kit.SortedLoss())
    rows = [token_logprobs(engine.model, batch.sequences.select(torch.tensor([b])))[0] for b in range(len(batch))]
    ordered = sorted((row.sum() for row in rows), key=lambda x: x.item())
    gaps = sum((high - low).square() for low, high in itertools.pairwise(ordered))
    (gaps + (sum(row.mean() for row in rows) / len(rows)).square()).backward()
    theirs = {n: p.grad for n, p in engine.model.model.named_parameters()}
    kit.require_close(ours, theirs, 1e-6)


def test_value_and_pair_gradients_do_not_depend_on_the_cut(tiny_llama_folder, tiny_bert_folder):
    critic = kit.scalar_engine(tiny_llama_folder, "value")
    encoder = kit.scalar_engine(tiny_bert_folder, "reward")
    for engine, batch, loss in ((critic, kit.batch(), kit.ValueLoss()), (encoder, kit.pairs(), kit.PairLoss())):
        whole = engine.gradients(batch, loss)
        engine.tokens_per_micro_batch = 1
        kit.require_close(engine.gradients(batch, loss), whole, 1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_gradient_checkpointing_changes_nothing(kind, tiny_llama_folder, tiny_gpt2_folder, tiny_bert_folder):
    folder = {"llama": tiny_llama_folder, "gpt2": tiny_gpt2_folder, "bert": tiny_bert_folder}[kind]
    found = []
    for on in (False, True):
        settings = {"gradient_checkpointing": on}
        if kind == "bert":
            engine, batch, loss = kit.scalar_engine(folder, "reward", settings), kit.pairs(), kit.PairLoss()
        else:
            engine, batch, loss = kit.policy_engine(folder, settings), kit.batch(), kit.TokenLoss()
        calls = []
        block = next(m for n, m in engine.model.module.named_modules() if n.endswith(("layers.0", "h.0", "layer.0")))
        block.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        found.append(engine.gradients(batch, loss))
        assert len(calls) == (2 if on else 1), "a checkpointed block runs again in the backward pass"
    kit.require_close(found[1], found[0], 1e-6)


def budgeted(folder, budget, **settings):
    return kit.policy_engine(folder, {"gradient_checkpointing": True, "activation_bytes": budget}, **settings)


def test_a_resumed_engine_recomputes_what_the_first_one_did(tiny_llama_folder, tmp_path):
    first = budgeted(tiny_llama_folder, 10**9)
    counts = [first.step(kit.batch(), kit.TokenLoss())["recomputed_blocks"].mean for _ in range(2)]
    assert counts == [1, 0], "the first pass measures"
    first.save_state(tmp_path / "state")
    held = first.state()
    wanted = first.step(kit.batch(), kit.TokenLoss())
    for saved in (tmp_path / "state", held):
        again = budgeted(tiny_llama_folder, 10**9)
        again.load_state(saved)
        assert again.step(kit.batch(), kit.TokenLoss()) == wanted
    plain = kit.policy_engine(tiny_llama_folder)
    plain.load_state(tmp_path / "state")
    assert "recomputed_blocks" not in plain.step(kit.batch(), kit.TokenLoss())


def test_only_trained_blocks_are_counted(tiny_llama_folder):
    """Two blocks; with one trained there is none below the topmost that could be recomputed."""
    top = budgeted(tiny_llama_folder, 1, train_layers=1)
    assert len(top.model.trunk.recompute.blocks) == 1
    with pytest.warns(UserWarning, match="model.activation_bytes is 1"):
        assert top.step(kit.batch(), kit.TokenLoss())["recomputed_blocks"].mean == 0
    assert budgeted(tiny_llama_folder, 1, train_layers=0).model.trunk.recompute is None


def test_a_pass_that_failed_is_not_counted(tiny_llama_folder):
    engine = budgeted(tiny_llama_folder, 10**9, tokens_per_micro_batch=12)
    with pytest.raises(TrainingError):
        engine.step(kit.batch(), kit.TokenLoss(bad=True))
    found = engine.step(kit.batch(), kit.TokenLoss())
    assert found["recomputed_blocks"].weight == found["micro_batches"].mean


@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
def test_bfloat16_gradients_are_close_and_summed_in_float32(tiny_llama_folder):
    exact = kit.policy_engine(tiny_llama_folder).gradients(kit.batch(), kit.TokenLoss())
    engine = kit.policy_engine(tiny_llama_folder, {"dtype": "bfloat16"})
    for budget in (10_000, 1):
        engine.tokens_per_micro_batch = budget
        rounded = engine.gradients(kit.batch(), kit.TokenLoss())
        assert {g.dtype for g in rounded.values()} == {torch.float32}
        kit.require_close(rounded, exact, 0.05)


def test_lora_gradients_do_not_depend_on_the_cut(tiny_llama_folder):
    engine = kit.policy_engine(tiny_llama_folder, {"lora_rank": 2})
    whole = engine.gradients(kit.batch(), kit.TokenLoss())
    assert all(".lora_" in name for name in whole)
    engine.tokens_per_micro_batch = 1
    kit.require_close(engine.gradients(kit.batch(), kit.TokenLoss()), whole, 1e-6)


class WrongWeights(kit.TokenLoss):
    def weights(self, batch):
        return Ragged(torch.ones(len(batch)), torch.ones(len(batch), dtype=torch.int64))


def test_items_and_weights_of_different_number_are_refused(tiny_llama_folder):
    with pytest.raises(ShapeError, match=r"34 items, 8 weights"):
        kit.policy_engine(tiny_llama_folder).step(kit.batch(), WrongWeights())
