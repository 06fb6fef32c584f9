"""Activation checkpointing by budget: sizes against what the whole trunk keeps, counts by hand, equal gradients."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from model_kit import WordTokenizer, build
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

from tutelage.config.common import ModelConfig
from tutelage.errors import ModelError
from tutelage.models.language_model import LanguageModel
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.models.recompute import Recompute, Sizes
from tutelage.models.weights import blocks_of, recompute_of
from tutelage.types import Sequences

LAYERS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four blocks each; bloom runs in padded rows."""
    made: dict[str, PreTrainedModel] = {
        "llama": build("llama", num_hidden_layers=LAYERS),
        "gpt2": build("gpt2", n_layer=LAYERS),
        "bloom": BloomForCausalLM(
            BloomConfig(vocab_size=90, hidden_size=64, n_layer=LAYERS, n_head=2, initializer_range=0.2)
        ),
    }
    found = {}
    for kind, model in made.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(found[kind])
    return found


def policy(folder: Path, budget: int | None, **settings: object) -> LanguageModel:
    cfg = ModelConfig(path=str(folder), gradient_checkpointing=True, activation_bytes=budget, **settings)
    model = load_causal_lm(cfg, WordTokenizer())
    if model.adapted is not None:
        for name, weight in model.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(3))
    model.model.train()
    return model


def rows(*lens: int) -> Sequences:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(5, 80, (n,), generator=generator).tolist() for n in lens]
    return Sequences.build([row[:2] for row in drawn], [row[2:] for row in drawn])


def bytes_kept(model: LanguageModel, sequences: Sequences, recomputed: int) -> int:
    """Of the whole trunk: every storage that autograd keeps, the weights' own left out."""
    for number, block in enumerate(blocks_of(model.trunk.model)):
        block.gradient_checkpointing = number < recomputed
    weights = {p.untyped_storage().data_ptr() for p in model.model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage
        return tensor

    chosen, model.trunk.recompute = model.trunk.recompute, None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.trunk.states(sequences.tokens).hidden
    model.trunk.recompute = chosen
    del hidden
    return sum(storage.nbytes() for address, storage in held.items() if address not in weights)


def gradients(model: LanguageModel, sequences: Sequences) -> dict[str, torch.Tensor]:
    model.model.zero_grad(set_to_none=True)
    model.trunk.states(sequences.tokens).hidden.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}


def test_the_fewest_blocks_by_hand() -> None:
    # 10 tokens, 4 blocks: inputs 10 x 4 x 2 = 80 bytes; each block that is kept 10 x 5 = 50 more
    sizes = Sizes(kept=5, entering=2)
    assert [sizes.held(10, 4, k) for k in range(4)] == [280, 230, 180, 130]
    budgets = (1000, 280, 279, 230, 200, 180, 130, 129, 1)
    assert [sizes.recomputed(10, 4, budget) for budget in budgets] == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    # twice the tokens: twice the bytes
    assert [sizes.recomputed(20, 4, budget) for budget in (560, 559)] == [0, 1]


@pytest.mark.parametrize("lora", [0, 2], ids=["full", "lora"])
@pytest.mark.filterwarnings("ignore:BloomModel cannot be packed")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_what_one_block_keeps_is_what_the_trunk_saves_by_recomputing_it(
    folders: dict[str, Path], kind: str, lora: int
) -> None:
    model, sequences = policy(folders[kind], 1, lora_rank=lora), rows(9, 30, 17)
    model.trunk.states(sequences.tokens)
    recompute = model.trunk.recompute
    assert recompute is not None
    assert recompute.sizes is not None
    assert model.trunk.layout == ("padded" if kind == "bloom" else "packed")
    tokens = 3 * 30 if kind == "bloom" else int(sequences.tokens.lens.sum())
    assert recompute.sizes.entering == 64 * 4, "a hidden state in float32"
    saved = bytes_kept(model, sequences, 1) - bytes_kept(model, sequences, 2)
    assert recompute.sizes.kept * tokens == pytest.approx(saved, rel=0.02)
    # and the trunk holds what the formula says, and outside its blocks (the last norm, ids) the same whatever k is
    rest = [bytes_kept(model, sequences, k) - recompute.sizes.held(tokens, LAYERS, k) for k in range(LAYERS)]
    assert max(rest) - min(rest) <= 0.02 * saved
    assert 0 <= min(rest) <= 4 * recompute.sizes.entering * tokens


@pytest.mark.parametrize("lora", [0, 2], ids=["full", "lora"])
@pytest.mark.filterwarnings("ignore:BloomModel cannot be packed")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_gradients_are_bit_for_bit_those_of_no_recomputation(folders: dict[str, Path], kind: str, lora: int) -> None:
    sequences = rows(9, 30, 17)
    plain = load_causal_lm(ModelConfig(path=str(folders[kind])), WordTokenizer())
    assert plain.trunk.recompute is None
    reference = policy(folders[kind], None, lora_rank=lora)
    reference.model.gradient_checkpointing_disable()
    expected = gradients(reference, sequences)
    model = policy(folders[kind], 10**12, lora_rank=lora)
    recompute = model.trunk.recompute
    assert recompute is not None
    gradients(model, sequences)
    assert recompute.sizes is not None
    tokens = 3 * 30 if kind == "bloom" else int(sequences.tokens.lens.sum())
    for k in range(LAYERS):
        recompute.budget = int(recompute.sizes.held(tokens, LAYERS, k)) + 1
        recompute.read()
        calls = {id(block): 0 for block in recompute.blocks}

        def count(block: torch.nn.Module, _: object, calls: dict[int, int] = calls) -> None:
            calls[id(block)] += 1

        handles = [block.register_forward_pre_hook(count) for block in recompute.blocks]
        found = gradients(model, sequences)
        for handle in handles:
            handle.remove()
        assert list(calls.values()) == [2] * k + [1] * (LAYERS - k), "the lowest k run twice"
        assert recompute.read().mean == k
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_first_pass_measures_and_has_the_same_gradients(folders: dict[str, Path]) -> None:
    sequences = rows(9, 30)
    first = policy(folders["llama"], 10**12)
    measuring = gradients(first, sequences)
    assert first.trunk.recompute is not None
    assert first.trunk.recompute.read().mean == LAYERS - 1
    later = gradients(first, sequences)
    assert first.trunk.recompute.read().mean == 0
    assert all(torch.equal(measuring[name], later[name]) for name in later)


def test_every_micro_batch_is_chosen_for_by_its_own_size(folders: dict[str, Path]) -> None:
    model = policy(folders["llama"], 10**12)
    gradients(model, rows(20))
    recompute = model.trunk.recompute
    assert recompute is not None
    assert recompute.sizes is not None
    recompute.budget = int(recompute.sizes.held(20, LAYERS, 1)) + 1
    recompute.read()
    counts = []
    for lens in ((20,), (10,), (30,)):
        gradients(model, rows(*lens))
        counts.append(recompute.read().mean)
    assert counts[:2] == [1, 0]
    assert counts[2] > 1


def test_a_pass_without_gradient_chooses_nothing(folders: dict[str, Path]) -> None:
    model = policy(folders["llama"], 10)
    recompute = model.trunk.recompute
    assert recompute is not None
    with torch.no_grad():
        model.trunk.states(rows(9).tokens)
    model.model.eval()
    model.trunk.states(rows(9).tokens)
    assert recompute.sizes is None
    assert recompute.read().weight == 0


def test_a_budget_below_the_least_warns_once_and_says_how_much(folders: dict[str, Path]) -> None:
    model = policy(folders["llama"], 7)
    with pytest.warns(
        UserWarning, match=r"model.activation_bytes is 7: a micro-batch of 9 tokens holds \d+ bytes"
    ) as seen:
        gradients(model, rows(9))
    sizes = model.trunk.recompute.sizes  # type: ignore[union-attr]
    assert f"holds {math.ceil(9 * (LAYERS * sizes.entering + sizes.kept))} bytes" in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(model, rows(9))


def test_a_pass_that_keeps_more_a_token_is_said_and_planned_with(folders: dict[str, Path]) -> None:
    """Responses to one prompt copy its keys and values: bytes a token depend on what is in a row."""
    model = policy(folders["llama"], 10**12)
    recompute = model.trunk.recompute
    assert recompute is not None
    model.trunk.shared_states(rows(20, 20))
    before = recompute.sizes
    assert before is not None
    prompt = list(range(5, 45))
    shared = Sequences.build([prompt] * 8, [[7, 8 + k] for k in range(8)])
    recompute.budget = int(before.held(56, LAYERS, 0)) + 1
    with pytest.warns(UserWarning, match=r"a micro-batch of 56 tokens held \d+ bytes, more a token than those before"):
        model.trunk.shared_states(shared)
    after = recompute.sizes
    assert after is not None
    assert after.kept > 1.1 * before.kept
    recompute.read()
    model.trunk.shared_states(shared)
    assert recompute.read().mean >= 1
    model.trunk.shared_states(rows(20, 20))
    assert recompute.sizes == after, "the most that was seen"


def test_a_failing_block_leaves_no_hook_behind(folders: dict[str, Path]) -> None:
    model = policy(folders["llama"], 10**12)
    top = blocks_of(model.trunk.model)[-1]
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise RuntimeError("the top fails")

    handle = top.mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the top fails"):
        model.trunk.states(rows(9).tokens)
    handle.remove()
    assert not top._forward_hooks
    assert not top._forward_pre_hooks
    gradients(model, rows(9))
    assert calls == [1]
    assert model.trunk.recompute.sizes is not None  # type: ignore[union-attr]


def test_critics_and_snapshots(folders: dict[str, Path]) -> None:
    cfg = ModelConfig(path=str(folders["llama"]), gradient_checkpointing=True, activation_bytes=5)
    critic = load_scalar_model(cfg, "value", tokenizer=WordTokenizer())
    assert critic.trunk.recompute is not None
    assert list(critic.trunk.recompute.blocks) == list(blocks_of(critic.backbone))
    copied = policy(folders["llama"], 5).snapshot()
    assert copied.trunk.recompute is None
    assert not any(block.gradient_checkpointing for block in blocks_of(copied.trunk.model))


def test_without_checkpointing_there_is_no_budget(folders: dict[str, Path]) -> None:
    cfg = ModelConfig(path=str(folders["llama"]))
    assert load_causal_lm(cfg, WordTokenizer()).trunk.recompute is None
    off = cfg.model_copy(update={"activation_bytes": 5})
    assert load_causal_lm(off, WordTokenizer()).trunk.recompute is None


def test_blocks_that_have_no_switch_are_refused(folders: dict[str, Path]) -> None:
    backbone = build("llama").model
    backbone.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    cfg = ModelConfig(path="x", gradient_checkpointing=True, activation_bytes=5)
    with pytest.raises(ModelError, match="cannot be recomputed one by one"):
        recompute_of(backbone, cfg)


def test_the_blocks_are_those_of_the_model(folders: dict[str, Path]) -> None:
    model = policy(folders["llama"], 5)
    assert isinstance(model.trunk.recompute, Recompute)
    assert [id(b) for b in model.trunk.recompute.blocks] == [id(b) for b in blocks_of(model.trunk.model)]
