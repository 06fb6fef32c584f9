"""A base in NF4 under adapters: the levels of the paper, a plain model of the same weights, bytes that never change."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import model_kit as kit
import pytest
import torch
from torch import Tensor, nn

from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.engines.held import held_bytes, storages
from tutelage.errors import MissingExtraError, ModelError
from tutelage.models import quantize
from tutelage.models.forward import token_logprobs
from tutelage.models.language_model import LanguageModel
from tutelage.models.load import load_causal_lm, load_scalar_model, value_from
from tutelage.models.lora import adapter_off, merged_weights
from tutelage.models.quantize import dense, is_quantized, packed, rounded
from tutelage.models.shared_base import load_shared_base
from tutelage.types import Demonstrations, Outputs, Ragged, Stats

pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Of NF4, as appendix E of arXiv:2305.14314 lists them."""


def settings(path: Path, **changes: object) -> ModelConfig:
    return ModelConfig(path=str(path), **{"lora_rank": 3, "lora_alpha": 6.0, "quantize": "nf4", **changes})


def stirred(model: nn.Module, seed: int = 1) -> None:
    """Adapters that are no longer 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def policy(folder: Path, **changes: object) -> LanguageModel:
    made = load_causal_lm(settings(folder, **changes), kit.WordTokenizer())
    if made.adapted is not None:
        stirred(made.model)
        made.masters.publish()
    return made


def plain_twin(quantized: LanguageModel, folder: Path) -> LanguageModel:
    """An unquantised model with adapters, whose base holds what the packed weights stand for."""
    made = policy(folder, quantize="none")
    weights = quantized.masters.full_precision()
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            parameter.copy_(weights[name])
    return made


def bytes_of(model: nn.Module) -> dict[str, str]:
    """Of everything but adapters and heads, the scales of packed weights included."""
    named = {name: p for name, p in model.named_parameters() if ".lora_" not in name and not p.requires_grad}
    return {
        name: hashlib.sha256(b"".join(bytes(s) for s in storages(weight))).hexdigest() for name, weight in named.items()
    }


class Fit:
    """(logp - 1)^2 per response token."""

    outputs = frozenset({"logp"})

    def weights(self, batch: Demonstrations) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.full((int(lens.sum()),), 1.0 / int(lens.sum())), lens)

    def items(self, out: Outputs, batch: Demonstrations) -> tuple[Tensor, Stats]:
        return (out.logp - 1.0).square(), {}


def batch(seed: int = 0) -> Demonstrations:
    sequences = kit.sequences(seed)
    return Demonstrations(sequences, tuple(str(i) for i in range(len(sequences))))


def engine(model: object, **changes: object) -> ModelEngine:
    return ModelEngine(model, OptimConfig(lr=1e-2, schedule="constant", tokens_per_micro_batch=16), **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # rows of whole blocks: others are refused on some processors
    kit.build("llama", intermediate_size=128).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


# ---- the format


def test_a_weight_is_its_blocks_scale_times_the_nearest_of_the_papers_levels():
    weight = 0.02 * torch.randn(96, 128, generator=torch.Generator().manual_seed(3))
    blocks, found = weight.double().reshape(-1, 64), rounded(weight).double().reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    nearest = levels[((blocks / largest)[..., None] - levels).abs().argmin(-1)]
    scale = (found * nearest).sum(1, keepdim=True) / nearest.square().sum(1, keepdim=True)
    torch.testing.assert_close(found, scale * nearest, atol=1e-9, rtol=1e-6)
    # scales are 8 bits of their distance to the mean
    spread = (largest - largest.mean()).abs().max()
    assert float((scale - largest).abs().max()) <= float(spread) / 16
    assert float((scale - largest).abs().max()) > 0


def test_a_weight_takes_four_bits_and_its_scales(folder):
    layer = nn.Linear(512, 256, bias=False)
    weight = quantize._packed(layer, torch.float32, "cpu").weight
    tables = 4 * (16 + 256 + 1)  # levels, those of the scales, and their mean: once for each matrix
    expected = 512 * 256 * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + tables
    assert sum(s.nbytes() for s in storages(weight)) == expected


def test_every_linear_layer_but_the_head_is_packed_and_only_the_adapters_are_trained(folder):
    made = policy(folder)
    names = {name for name, m in made.model.named_modules() if is_quantized(m) and ".base_layer" in name}
    assert len(names) == 2 * 7
    assert not is_quantized(made.model.get_output_embeddings())
    assert not any(packed(p) for n, p in made.model.named_parameters() if ".base_layer" not in n)
    assert set(made.masters.masters) == {n for n, p in made.model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in made.masters.masters)


def test_weights_of_other_names_are_what_was_loaded(folder):
    made, plain = policy(folder), policy(folder, quantize="none")
    every = dict(plain.model.named_parameters())
    for name, weight in made.masters.full_precision().items():
        exact = ".base_layer" not in name
        assert torch.equal(weight, every[name]) == exact, name
        assert weight.shape == every[name].shape
        torch.testing.assert_close(
            weight, every[name].detach(), atol=0.16 * float(every[name].detach().abs().max()), rtol=0
        )


@pytest.mark.parametrize("changed", ["a block has another's scale", "one weight is two levels off"])
def test_a_matrix_that_comes_back_as_another_one_is_refused(folder, changed, monkeypatch):
    real = quantize.dense

    def wrong(weight: Tensor) -> Tensor:
        found = real(weight).clone()
        blocks = found.flatten().view(-1, quantize.BLOCK)
        if changed == "a block has another's scale":
            blocks[1] *= 2
        else:
            blocks[1, blocks[1].abs().argmax()] *= 1 - 0.304 - 0.171
        return found

    monkeypatch.setattr(quantize, "dense", wrong)
    with pytest.raises(ModelError, match=r"q_proj \(64, 64\) in 4 bits is another matrix in 1 of 64 blocks"):
        policy(folder)


def test_rows_of_no_whole_number_of_blocks_are_right_or_refused(tmp_path):
    """bitsandbytes decides by the processor."""
    kit.build("llama", intermediate_size=96).save_pretrained(tmp_path / "odd")
    weight = drawn_down_projection(tmp_path / "odd")
    returned = rounded(weight)
    if float((returned - weight).abs().max()) > 0.16 * float(weight.abs().max()):
        with pytest.raises(ModelError, match=r"down_proj \(64, 96\) in 4 bits is another matrix"):
            policy(tmp_path / "odd")
        return
    name = "model.layers.0.mlp.down_proj.base_layer.weight"
    assert torch.equal(policy(tmp_path / "odd").masters.full_precision()[name], returned)


def drawn_down_projection(folder: Path) -> Tensor:
    plain = policy(folder, quantize="none").model
    return plain.get_parameter("model.layers.0.mlp.down_proj.base_layer.weight").detach()


# ---- numbers


def test_logprobs_and_gradients_are_those_of_a_plain_model_with_the_same_weights(folder):
    made = policy(folder)
    twin = plain_twin(made, folder)
    grads = []
    for model in (made, twin):
        logp = token_logprobs(model, kit.sequences(), 0.7)[0]
        logp.square().sum().backward()
        grads.append((logp.detach(), {n: p.grad for n, p in model.model.named_parameters() if p.requires_grad}))
    (mine, my_grads), (theirs, their_grads) = grads
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert my_grads.keys() == their_grads.keys()
    for name, grad in my_grads.items():
        torch.testing.assert_close(grad, their_grads[name], atol=1e-3, rtol=1e-4)


def test_quantisation_changes_the_numbers(folder):
    made, plain = policy(folder), policy(folder, quantize="none")
    gap = (token_logprobs(made, kit.sequences())[0] - token_logprobs(plain, kit.sequences())[0]).abs().max()
    assert gap.item() > 1e-3


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
def test_updates_change_no_byte_of_the_base(folder, changes):
    made = policy(folder, **changes)
    before, adapters = bytes_of(made.model), {n: m.detach().clone() for n, m in made.masters.masters.items()}
    with torch.no_grad(), adapter_off(made.adapted):
        reference = token_logprobs(made, kit.sequences())[0]
    learner = engine(made)
    losses = [learner.step(batch(), Fit())["loss"].total for _ in range(4)]
    assert losses[-1] < losses[0]
    assert bytes_of(made.model) == before
    assert all(not torch.equal(m, adapters[n]) for n, m in made.masters.masters.items())
    with torch.no_grad(), adapter_off(made.adapted):
        assert torch.equal(token_logprobs(made, kit.sequences())[0], reference)


def test_the_saved_folder_is_a_plain_model_that_computes_the_same(folder, tmp_path):
    made = policy(folder)
    made.save_pretrained(tmp_path / "saved")
    plain = load_causal_lm(ModelConfig(path=str(tmp_path / "saved")), kit.WordTokenizer())
    mine, theirs = (token_logprobs(m, kit.sequences())[0] for m in (made, plain))
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)
    named = dict(made.named_weights())
    assert all(torch.equal(named[n], w) for n, w in plain.model.named_parameters())


def test_packed_weights_are_not_merged(folder):
    made = policy(folder)
    with pytest.raises(ModelError, match="shape"):
        merged_weights(made.model, dict(made.model.named_parameters()))


def test_a_critic_from_the_policy_has_a_packed_base_of_its_own(folder):
    made = policy(folder)
    value = value_from(made, settings(folder))
    assert sum(is_quantized(m) for n, m in value.named_modules() if ".base_layer" in n) == 2 * 7
    ours = {s.data_ptr() for p in made.model.parameters() for s in storages(p)}
    assert not ours & {s.data_ptr() for p in value.parameters() for s in storages(p)}


def test_the_exported_folder_is_read_without_what_was_packed(folder, tmp_path):
    """A scalar model's folder: head and merged backbone, as without a packed base."""
    model = load_scalar_model(settings(folder), "reward", tokenizer=kit.WordTokenizer(), seed=4)
    stirred(model, 5)
    model.save_pretrained(tmp_path / "reward")
    again = load_scalar_model(ModelConfig(path=str(tmp_path / "reward")), "reward", tokenizer=kit.WordTokenizer())
    tokens = kit.sequences().tokens
    with torch.no_grad():
        torch.testing.assert_close(model.scores(tokens), again.scores(tokens), atol=2e-5, rtol=1e-5)


# ---- memory


def test_what_a_role_holds_counts_packed_weights(tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    kit.build("llama", **wide).save_pretrained(tmp_path / "wide")
    sizes = {}
    for form in ("none", "nf4"):
        made = load_causal_lm(settings(tmp_path / "wide", quantize=form), kit.WordTokenizer())
        linear = [m for n, m in made.model.named_modules() if n.endswith(".base_layer")]
        rest = held_bytes(engine(made)).weights
        sizes[form] = rest, sum(math.prod(quantize.dense_shape(m.weight)) for m in linear)
    (full, count), (small, same) = sizes["none"], sizes["nf4"]
    assert count == same
    tables = 2 * 7 * 4 * (16 + 256 + 1)
    assert full - small == pytest.approx(count * (32 - 4.127) / 8 - tables, rel=1e-3)


def test_a_checkpoint_is_counted_with_whole_matrices(folder):
    counted = [engine(policy(folder, quantize=form)).checkpoint_bytes() for form in ("none", "nf4")]
    assert counted[0] == counted[1]


# ---- one base for all


def reward_folder(base: Path, folder: Path, **changes: object) -> Path:
    model = load_scalar_model(settings(base, **changes), "reward", tokenizer=kit.WordTokenizer(), seed=4)
    stirred(model, 5)
    model.masters.publish()
    model.save_pretrained(folder)
    return folder


def shared(base: Path, reward: Path, **changes: object):
    return load_shared_base(
        settings(base, **changes),
        kit.WordTokenizer(),
        rewards={str(reward): kit.WordTokenizer()},
        critic=lambda rewards: None,
    )


def test_the_packed_base_is_in_memory_once(folder, tmp_path):
    reward = reward_folder(folder, tmp_path / "reward")
    made = shared(folder, reward)
    assert (made.obstacles, made.cautions) == ({}, {})
    trees = [made.policy.model.base_model, made.critic.backbone, made.rewards[str(reward)].backbone]
    named = [dict(tree.named_parameters()) for tree in trees]
    for name, weight in named[0].items():
        same = [tree[name] is weight for tree in named[1:]]
        assert same == ([False, False] if ".lora_" in name else [True, True]), name
    assert sum(packed(weight) for weight in named[0].values()) == 2 * 7
    alone = load_scalar_model(ModelConfig(path=str(reward)), "reward", tokenizer=kit.WordTokenizer())
    tokens = kit.sequences().tokens
    with torch.no_grad():
        torch.testing.assert_close(made.rewards[str(reward)].scores(tokens), alone.scores(tokens), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
def test_a_reward_model_of_the_base_before_it_was_packed_is_taken_and_named(folder, tmp_path, dtype):
    reward = reward_folder(folder, tmp_path / "reward", quantize="none", dtype=dtype)
    made = shared(folder, reward)
    assert list(made.rewards) == list(made.cautions) == [str(reward)]
    assert "before it was quantised" in made.cautions[str(reward)]


@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
def test_a_packed_reward_model_that_was_trained_in_bfloat16_fits(folder, tmp_path):
    """Embeddings and norms are rounded to bfloat16 there, packed matrices are not."""
    reward = reward_folder(folder, tmp_path / "reward", dtype="bfloat16")
    made = shared(folder, reward)
    assert (made.obstacles, made.cautions) == ({}, {})


def test_a_reward_model_of_a_packed_base_is_no_adapter_on_the_whole_one(folder, tmp_path):
    reward = reward_folder(folder, tmp_path / "reward")
    made = shared(folder, reward, quantize="none")
    assert "another base" in made.obstacles[str(reward)]


def test_a_reward_model_of_another_base_is_none_of_the_packed_one(folder, tmp_path):
    kit.build("llama", seed=9, intermediate_size=128).save_pretrained(tmp_path / "other")
    reward = reward_folder(tmp_path / "other", tmp_path / "reward")
    made = shared(folder, reward)
    assert "another base" in made.obstacles[str(reward)]


# ---- refused


def test_an_architecture_without_plain_linear_layers_is_refused(tmp_path):
    kit.build("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ModelError, match=r"Conv1D.*\n?.*model.quantize to none"):
        load_causal_lm(settings(tmp_path / "gpt2"), kit.WordTokenizer())


def test_an_architecture_that_reads_a_layers_weight_is_refused(folder, monkeypatch):
    monkeypatch.setattr(quantize, "READ_WEIGHTS", frozenset({"llama"}))
    with pytest.raises(ModelError, match="reads the weight of a linear layer"):
        load_causal_lm(settings(folder), kit.WordTokenizer())


def test_without_the_package_its_extra_is_named(folder, monkeypatch):
    monkeypatch.setattr(quantize, "installed", lambda name: name != "bitsandbytes")
    with pytest.raises(MissingExtraError, match=r"tutelage\[qlora\]"):
        load_causal_lm(settings(folder), kit.WordTokenizer())


def test_dense_is_the_weight_itself_where_nothing_is_packed():
    weight = nn.Parameter(torch.randn(3, 4))
    assert dense(weight) is weight
    assert quantize.dense_shape(weight) == (3, 4)
