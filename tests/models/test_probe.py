"""The load-time probe: architectures that leak when packed are caught and padded; unknown heads are refused."""

from __future__ import annotations

import model_kit as kit
import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
)

from tutelage.errors import ModelError
from tutelage.models.dropout import disable_dropout
from tutelage.models.forward import token_logprobs
from tutelage.models.language_model import LanguageModel, backbone_of, logits_function
from tutelage.models.paths import max_positions
from tutelage.models.precision import MasterWeights
from tutelage.models.probe import choose_layout, require_head

SIZES = {
    "vocab_size": kit.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def seeded(build, *args, **kwargs) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return disable_dropout(build(*args, **kwargs))


def require_native_logprobs(model: PreTrainedModel, layout: str) -> None:
    trunk = choose_layout(backbone_of(model))
    assert trunk.layout == layout
    assert trunk.causal
    require_head(model, trunk, logits_function(model))
    policy = LanguageModel(model, trunk, kit.WordTokenizer(), MasterWeights(model, torch.float32))
    seqs = kit.sequences()
    got = token_logprobs(policy, seqs, 0.7)[0]
    torch.testing.assert_close(got, torch.cat(kit.native_logprobs(model, seqs, 0.7)), atol=2e-5, rtol=0)


def test_sliding_windows_are_honoured():
    model = seeded(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=4))
    require_native_logprobs(model, "packed")


def test_attention_and_logit_soft_caps_are_honoured():
    config = Gemma2Config(
        **SIZES, sliding_window=4, attn_logit_softcapping=1.5, final_logit_softcapping=3.0, query_pre_attn_scalar=32
    )
    require_native_logprobs(seeded(Gemma2ForCausalLM, config), "packed")


@pytest.mark.parametrize("kind", ["cohere", "granite"])
def test_logit_scales_are_honoured(kind):
    if kind == "cohere":
        small = {k: v for k, v in SIZES.items() if k != "head_dim"}
        model = seeded(CohereForCausalLM, CohereConfig(**small, logit_scale=0.3))
    else:
        model = seeded(GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=3.0))
    require_native_logprobs(model, "packed")


def test_a_state_space_model_leaks_and_is_padded_with_a_warning():
    config = MambaConfig(vocab_size=kit.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3)
    model = seeded(MambaForCausalLM, config)
    with pytest.warns(UserWarning, match="MambaModel cannot be packed"):
        trunk = choose_layout(backbone_of(model))
    assert trunk.layout == "padded"


def test_alibi_positions_cannot_be_packed_and_are_padded():
    config = BloomConfig(vocab_size=kit.VOCAB, hidden_size=64, n_layer=2, n_head=2, initializer_range=0.2)
    with pytest.warns(UserWarning, match="cannot be packed"):
        require_native_logprobs(seeded(BloomForCausalLM, config), "padded")


def test_attention_sinks_cannot_be_packed_and_are_padded():
    config = GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
    with pytest.warns(UserWarning, match="attention sinks"):
        trunk = choose_layout(backbone_of(seeded(GptOssForCausalLM, config)))
    assert trunk.layout == "padded"


class TokenShift(nn.Module):
    """Adds to every token a part of the one before it in the row: what a convolution does across packed segments."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden, *args, **kwargs):
        shifted = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return self.inner(hidden + 0.05 * shifted, *args, **kwargs)


@pytest.mark.filterwarnings("ignore:GPT2Model cannot be packed")
def test_a_layer_that_leaks_into_the_next_segment_is_seen_and_its_padded_numbers_are_right():
    model = disable_dropout(kit.build("gpt2"))
    model.transformer.h[1] = TokenShift(model.transformer.h[1])
    with pytest.warns(UserWarning, match="GPT2Model cannot be packed"):
        trunk = choose_layout(model.transformer)
    assert trunk.layout == "padded"
    seqs = kit.sequences()
    got = trunk.hidden(seqs.tokens)
    alone = torch.cat([model.transformer(input_ids=row[None]).last_hidden_state[0] for row in seqs.tokens.rows()])
    torch.testing.assert_close(got, alone, atol=1e-5, rtol=0)


class Forgetful(nn.Module):
    """Position embeddings that count along the row whatever positions they are given."""

    def __init__(self, inner: nn.Embedding) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, position_ids):
        return self.inner(torch.arange(position_ids.shape[1])[None])


def test_positions_that_are_ignored_are_seen():
    model = disable_dropout(kit.build("gpt2"))
    model.transformer.wpe = Forgetful(model.transformer.wpe)
    with pytest.warns(UserWarning, match="cannot be packed"):
        assert choose_layout(model.transformer).layout == "padded"


class Neighbourly(nn.Module):
    """Adds the mean over the whole batch: nothing makes that right."""

    def forward(self, hidden, *args, **kwargs):
        return hidden + hidden.mean(dim=(0, 1), keepdim=True)


def test_a_model_whose_batch_changes_its_numbers_is_refused():
    model = disable_dropout(kit.build("gpt2"))
    model.transformer.h[1] = Neighbourly()
    with pytest.raises(ModelError, match="other hidden states for a batch"):
        choose_layout(model.transformer)


def test_an_unknown_transformation_of_the_logits_is_refused():
    model = disable_dropout(kit.build("llama"))
    plain = model.forward
    model.forward = lambda **kw: type("Out", (), {"logits": plain(**kw).logits * 1.01})
    trunk = choose_layout(model.model)
    with pytest.raises(ModelError, match="are not its output layer"):
        require_head(model, trunk, logits_function(model))


def test_roberta_positions_begin_behind_the_pad_id():
    config = RobertaConfig(
        vocab_size=kit.VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=34,
        pad_token_id=1,
        initializer_range=0.2,
    )
    model = seeded(RobertaModel, config, add_pooling_layer=False)
    trunk = choose_layout(model)
    assert (trunk.layout, trunk.causal) == ("packed", False)
    assert max_positions(config) == 32


def test_the_probe_leaves_training_mode_and_global_randomness_alone():
    model = disable_dropout(kit.build("llama")).train()
    before = torch.random.get_rng_state()
    choose_layout(model.model)
    assert model.training
    assert model.model.layers[0].training
    assert torch.equal(before, torch.random.get_rng_state())
