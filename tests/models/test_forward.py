"""Packed forward passes against transformers' own eager attention, one sequence at a time."""

from __future__ import annotations

import model_kit as kit
import pytest
import torch
from torch import nn

from tutelage.errors import ModelError, ShapeError
from tutelage.models.dropout import disable_dropout
from tutelage.models.forward import outputs, predicting_index, token_logprobs, token_values, values_with_bootstrap
from tutelage.models.heads import ScalarModel, fresh_head
from tutelage.models.language_model import LanguageModel, backbone_of
from tutelage.models.precision import MasterWeights
from tutelage.models.probe import choose_layout
from tutelage.types import Ragged, Sequences


def language_model(kind: str, **changes: object) -> LanguageModel:
    model = disable_dropout(kit.build(kind, **changes))
    trunk = choose_layout(backbone_of(model))
    return LanguageModel(model, trunk, kit.WordTokenizer(), MasterWeights(model, torch.float32))


def scalar_model(kind: str, role: str, pooling: str) -> ScalarModel:
    backbone = disable_dropout(kit.build(kind))
    backbone = backbone_of(backbone) if kind in kit.DECODERS else backbone
    head = fresh_head("reward", 64, pooling, seed=3)
    model = ScalarModel(choose_layout(backbone), head.layers, role, pooling, tokenizer=kit.WordTokenizer())
    model.masters = MasterWeights(model, torch.float32)
    return model


@pytest.mark.parametrize("kind", kit.DECODERS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_equal_one_by_one(kind, temperature):
    model, seqs = language_model(kind), kit.sequences()
    assert model.trunk.layout == "packed"
    logp_R, entropy_R = token_logprobs(model, seqs, temperature, with_entropy=True)
    expected = torch.cat(kit.native_logprobs(model.model, seqs, temperature))
    torch.testing.assert_close(logp_R, expected, atol=1e-5, rtol=0)
    assert entropy_R is not None
    twin = kit.native(model.model)
    row, prompt = seqs.tokens.rows()[3], int(seqs.prompt_lens[3])
    p = torch.softmax(twin(input_ids=row[None]).logits[0] / temperature, -1)[prompt - 1 : -1].double()
    torch.testing.assert_close(
        Ragged(entropy_R, seqs.response_lens).rows()[3].double(), -(p * p.log()).sum(-1), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("kind", kit.DECODERS)
def test_packed_gradients_equal_one_by_one(kind):
    model, seqs = language_model(kind), kit.sequences()
    weight_R = torch.randn(int(seqs.response_lens.sum()), generator=torch.Generator().manual_seed(1))
    (token_logprobs(model, seqs, 0.7)[0] * weight_R).sum().backward()
    twin = kit.native(model.model)
    total = torch.zeros(())
    for row, prompt, weight in zip(
        seqs.tokens.rows(), seqs.prompt_lens.tolist(), weight_R.split(seqs.response_lens.tolist()), strict=True
    ):
        logp = torch.log_softmax(twin(input_ids=row[None]).logits[0] / 0.7, -1)
        picked = logp[torch.arange(prompt - 1, len(row) - 1), row[prompt:]]
        total = total + (picked * weight).sum()
    total.backward()
    theirs = dict(twin.named_parameters())
    for name, parameter in model.model.named_parameters():
        assert parameter.grad is not None, name
        scale = theirs[name].grad.norm()
        assert (parameter.grad - theirs[name].grad).norm() <= 1e-5 * scale + 1e-6, name


@pytest.mark.parametrize("kind", [*kit.DECODERS, *kit.ENCODERS])
@pytest.mark.parametrize("pooling", ["last", "first", "mean"])
def test_packed_scores_equal_one_by_one(kind, pooling):
    if pooling == "first" and kind in kit.DECODERS:
        with pytest.raises(ModelError, match="sees nothing"):
            scalar_model(kind, "reward", pooling)
        return
    model, seqs = scalar_model(kind, "reward", pooling), kit.sequences()
    assert model.trunk.causal == (kind in kit.DECODERS)
    got = outputs(model, seqs, {"score"}, 1.0).score
    pick = {"last": lambda h: h[-1], "first": lambda h: h[0], "mean": lambda h: h.mean(0)}[pooling]
    weight, bias = model.score.weight[0], model.score.bias[0]
    expected = torch.stack([pick(h) @ weight + bias for h in kit.native_hidden(model.backbone, seqs)])
    assert got is not None
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", kit.ENCODERS)
def test_packed_gradients_of_encoder_scores_equal_one_by_one(kind):
    model, seqs = scalar_model(kind, "reward", "mean"), kit.sequences()
    weight_B = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0])
    (model.scores(seqs.tokens) * weight_B).sum().backward()
    twin = kit.native(model.backbone)
    rows = [twin(input_ids=row[None]).last_hidden_state[0].mean(0) for row in seqs.tokens.rows()]
    ((torch.stack(rows) @ model.score.weight[0].detach()) * weight_B).sum().backward()
    theirs = dict(twin.named_parameters())
    for name, parameter in model.backbone.named_parameters():
        scale = theirs[name].grad.norm()
        assert (parameter.grad - theirs[name].grad).norm() <= 1e-5 * scale + 1e-6, name


@pytest.mark.parametrize("kind", kit.DECODERS)
def test_values_stand_before_each_token_and_one_after_the_last(kind):
    model, seqs = scalar_model(kind, "value", "last"), kit.sequences()
    values = values_with_bootstrap(model, seqs)
    assert values.lens.tolist() == [n + 1 for n in seqs.response_lens.tolist()]
    hidden = kit.native_hidden(model.backbone, seqs)
    weight, bias = model.score.weight[0], model.score.bias[0]
    for row, h, prompt in zip(values.rows(), hidden, seqs.prompt_lens.tolist(), strict=True):
        torch.testing.assert_close(row, h[prompt - 1 :] @ weight + bias, atol=1e-5, rtol=0)
    before = torch.cat([row[:-1] for row in values.rows()])
    torch.testing.assert_close(token_values(model, seqs), before, atol=1e-6, rtol=0)


def test_the_score_is_read_at_the_last_real_token_also_when_that_is_the_pad_token():
    model = scalar_model("llama", "reward", "last")
    assert model.backbone.config.pad_token_id == 2
    seqs = Sequences.build([[5, 6], [7]], [[8, 2, 2], [9, 10]])
    got = model.scores(seqs.tokens)
    h = kit.native_hidden(model.backbone, seqs)[0]
    at = (h @ model.score.weight[0] + model.score.bias[0]).tolist()
    assert abs(got[0].item() - at[4]) < 1e-5
    assert min(abs(at[4] - at[3]), abs(at[4] - at[2])) > 1e-3


def test_more_sequences_beside_it_do_not_change_a_logprob():
    model, seqs = language_model("llama"), kit.sequences()
    alone = token_logprobs(model, seqs.select(torch.tensor([3])), 0.7)[0]
    beside = Ragged(token_logprobs(model, seqs, 0.7)[0], seqs.response_lens).rows()[3]
    torch.testing.assert_close(alone, beside, atol=1e-5, rtol=0)


def test_a_response_without_prompt_is_refused():
    with pytest.raises(ShapeError, match="sequence 1 has no prompt token"):
        predicting_index(Sequences.build([[1], []], [[2], [3]]))


def test_an_empty_sequence_is_refused():
    with pytest.raises(ShapeError, match="sequence 0 has no tokens"):
        language_model("gpt2").trunk.hidden(Ragged.from_rows([torch.zeros(0, dtype=torch.int64)]))


def test_an_empty_response_has_one_value_and_no_logprob():
    seqs = Sequences.build([[5, 6], [7]], [[], [9, 10]])
    assert values_with_bootstrap(scalar_model("gpt2", "value", "last"), seqs).lens.tolist() == [1, 3]
    assert token_logprobs(language_model("gpt2"), seqs)[0].shape == (2,)


def test_a_sequence_longer_than_the_context_is_refused_with_numbers():
    seqs = kit.sequences(lens=((2, 3), (60, 5)))
    with pytest.raises(ModelError, match=r"sequence 1 has 65 tokens, the model's context is 64"):
        token_logprobs(language_model("gpt2"), seqs)


def test_a_loss_that_needs_what_the_model_does_not_compute_is_refused():
    with pytest.raises(ModelError, match="needs value, this model computes candidate_logp, entropy"):
        outputs(language_model("llama"), kit.sequences(), {"value"}, 1.0)


@pytest.mark.parametrize("kind", [*kit.DECODERS, *kit.ENCODERS])
def test_dropout_is_off_in_training_mode(kind):
    row = torch.arange(3, 23)[None]
    model = kit.build(kind).train()
    first, second = (model(input_ids=row)[0] for _ in range(2))
    assert not torch.equal(first, second), "the control: these models have dropout"
    assert any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()) or model.config.attention_dropout > 0
    disable_dropout(model)
    first, second = (model(input_ids=row)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, kit.native(model)(input_ids=row)[0], atol=1e-4, rtol=1e-4)
    assert not any("drop" in k and isinstance(v, float) and v > 0 for k, v in vars(model.config).items())
    assert all(m.p == 0 for m in model.modules() if isinstance(m, nn.Dropout))
