"""Sequences that share a prompt in one row: the same numbers and gradients as each sequence alone."""

from __future__ import annotations

import model_kit as kit
import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from tutelage.errors import ModelError
from tutelage.math.logprobs import Asked
from tutelage.models import attention as attention_file
from tutelage.models.attention import attention
from tutelage.models.dropout import disable_dropout
from tutelage.models.forward import (
    outputs,
    sequence_scores,
    shares_prompts,
    token_logprobs,
    token_outputs,
    token_scores,
    token_values,
    values_with_bootstrap,
)
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel, backbone_of
from tutelage.models.parallel.tokens import TokenParallel
from tutelage.models.precision import MasterWeights
from tutelage.models.prefix import NO_PREFIX, Segments, attention_alone, shared_row
from tutelage.models.probe import choose_layout
from tutelage.models.trunk import Trunk
from tutelage.types import Sequences

A, B = list(range(10, 19)), list(range(40, 51))  # prompts of 9 and 11 tokens
GROUPS = Sequences.build(
    [A, [3, 4, 5], B, A, B, A, B],
    [[1, 2, 3], [6, 7], [], [8], [9, 10, 11, 12], [13, 14, 15, 16, 17], [18, 19]],
)
SHARED_TOKENS = 9 + 9 + 11 + 6 + 5
"""Prompt and answers of the first group, of the second, and the sequence of its own."""


def test_the_row_of_two_groups_by_hand():
    seqs = Sequences.build([A[:8], [1, 2], A[:8], B[:8], B[:8], A[:8]], [[71, 72], [73], [74], [], [75], [76, 77]])
    row = shared_row(seqs)
    assert row is not None
    assert row.flat.tolist() == [*A[:8], 71, 72, 74, 76, 77, 1, 2, 73, *B[:8], 75]
    assert row.positions.tolist() == [*range(8), 8, 9, 8, 8, 9, 0, 1, 2, *range(8), 8]
    assert row.segments.lens == (8, 2, 1, 2, 3, 8, 1)
    assert row.segments.prefixes == (NO_PREFIX, 0, 0, 0, NO_PREFIX, NO_PREFIX, 5)
    first, second = list(range(8)), list(range(16, 24))
    assert row.index.tolist() == [*first, 8, 9, 13, 14, 15, *first, 10, *second, *second, 24, *first, 11, 12]


def test_nothing_is_shared_between_different_or_short_prompts():
    assert shared_row(kit.sequences()) is None
    assert shared_row(Sequences.build([A, A[:8], B], [[1], [1], [1]])) is None
    assert shared_row(Sequences.build([A[:7]] * 2, [[1], [2]])) is None
    assert shared_row(Sequences.build([[]] * 2, [[1], [2]])) is None


# ---- attention ----

LENS, PREFIXES = (5, 3, 4, 6, 2), (NO_PREFIX, 0, 0, NO_PREFIX, 3)


def allowed(window: int | None) -> Tensor:
    """(20, 20) from where each token is in its own sequence."""
    place = [(run, at) for run, n in enumerate(LENS) for at in range(n)]
    mask = torch.zeros(20, 20, dtype=torch.bool)
    for q, (query_run, query_at) in enumerate(place):
        prompt = PREFIXES[query_run]
        position = query_at + (LENS[prompt] if prompt != NO_PREFIX else 0)
        for k, (key_run, key_at) in enumerate(place):
            if key_run == query_run:
                distance = query_at - key_at
            elif key_run == prompt:
                distance = position - key_at
            else:
                continue
            mask[q, k] = distance >= 0 and (window is None or distance < window)
    return mask


def explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: float | None) -> Tensor:
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("queries", [2, 256])
def test_shared_prompts_equal_an_explicit_softmax_over_a_mask(window, softcap, queries, monkeypatch):
    monkeypatch.setattr(attention_file, "SHARED_QUERIES", queries)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 20, 8, dtype=torch.float64, generator=generator).requires_grad_() for heads in (4, 2, 2)
    )
    segments = Segments(LENS, PREFIXES)
    out, _ = attention(nn.Module(), query, key, value, shared_prompts=segments, sliding_window=window, softcap=softcap)
    expected = explicit(query, key, value, allowed(window), softcap)
    exact = {"atol": 1e-12 if softcap is None else 1e-6, "rtol": 0.0}  # the soft cap is applied in float32
    torch.testing.assert_close(out, expected, **exact)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    ours = torch.autograd.grad((out * weight).sum(), [query, key, value])
    theirs = torch.autograd.grad((expected * weight).sum(), [query, key, value])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **{**exact, "atol": 10 * exact["atol"]})


def test_the_keys_of_variable_length_kernels():
    index, queries, keys = Segments(LENS, PREFIXES).keys(torch.device("cpu"))
    first, third = [0, 1, 2, 3, 4], [12, 13, 14, 15, 16, 17]
    assert index.tolist() == [*first, *first, 5, 6, 7, *first, 8, 9, 10, 11, *third, *third, 18, 19]
    assert queries.tolist() == [0, 5, 8, 12, 18, 20]
    assert keys.tolist() == [0, 5, 13, 22, 28, 36]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shared_prompts": Segments((4, 2), (NO_PREFIX, 0))}, "segments end at 6, the packed row has 20"),
        ({"shared_prompts": Segments(LENS, PREFIXES), "is_causal": False}, "not causal"),
        ({"shared_prompts": Segments(LENS, PREFIXES), "cu_seq_lens_q": torch.tensor([0, 20])}, "both"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(arguments, words):
    with pytest.raises(ModelError, match=words):
        attention(nn.Module(), *(torch.randn(1, 2, 20, 8) for _ in range(3)), **arguments)


# ---- models ----

SIZES = {
    "vocab_size": kit.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 2,
}


def build(kind: str) -> PreTrainedModel:
    if kind in kit.DECODERS:
        return disable_dropout(kit.build(kind))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "mistral":
            return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))
        caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
        return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=5, **caps))


def policy(model: PreTrainedModel) -> LanguageModel:
    trunk = choose_layout(backbone_of(model))
    return LanguageModel(model.eval(), trunk, kit.WordTokenizer(), MasterWeights(model, torch.float32))


def tokens_run(model: nn.Module) -> list[int]:
    """Filled with the tokens that every forward embeds."""
    found: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: found.append(inputs[0].numel()))
    return found


def one_by_one(function, seqs: Sequences) -> list[Tensor]:
    return [function(seqs.select(torch.tensor([b]))) for b in range(len(seqs))]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2"])
def test_logprobs_and_gradients_equal_those_of_every_sequence_alone(kind):
    model = policy(build(kind))
    embedded = tokens_run(model.model)
    logp, entropy = token_logprobs(model, GROUPS, 0.7, with_entropy=True)
    assert embedded == [SHARED_TOKENS]
    answered = GROUPS.select(torch.nonzero(GROUPS.response_lens).squeeze(1))
    native = torch.cat(kit.native_logprobs(model.model, answered, 0.7))
    torch.testing.assert_close(logp, native, atol=2e-5, rtol=0)
    weights = [p for p in model.model.parameters() if p.requires_grad]
    ours = torch.autograd.grad((logp.square() + 0.1 * entropy).sum(), weights)

    def alone(one: Sequences) -> Tensor:
        logp, entropy = token_logprobs(model, one, 0.7, with_entropy=True)
        return (logp.square() + 0.1 * entropy).sum()

    theirs = torch.autograd.grad(torch.stack(one_by_one(alone, answered)).sum(), weights)
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm()) + 1e-6


def test_sharing_off_runs_every_prompt_and_gives_the_same():
    model = policy(build("llama"))
    embedded = tokens_run(model.model)
    found = [token_outputs(model, GROUPS, Asked(entropy=True, top=3), share=share) for share in (True, False)]
    assert embedded == [SHARED_TOKENS, int(GROUPS.tokens.lens.sum())]
    for name in ("logp", "entropy", "top_logp", "top_ids"):
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-5, rtol=0)


def scalar(kind: str, pooling: str) -> ScalarModel:
    backbone = backbone_of(build("llama"))
    torch.manual_seed(1)
    return ScalarModel(choose_layout(backbone), {"score": nn.Linear(64, 1)}, kind, pooling).eval()  # type: ignore[arg-type]


def test_values_and_token_scores_equal_those_of_every_sequence_alone():
    critic = scalar("value", "last")
    embedded = tokens_run(critic.backbone)
    for function in (lambda s: values_with_bootstrap(critic, s).flat, lambda s: token_scores(critic, s)):
        embedded.clear()
        found = function(GROUPS)
        assert embedded == [SHARED_TOKENS]
        torch.testing.assert_close(found, torch.cat(one_by_one(function, GROUPS)), atol=1e-5, rtol=0)
    alone = torch.cat(one_by_one(lambda s: token_values(critic, s), GROUPS))
    torch.testing.assert_close(token_values(critic, GROUPS), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["last", "mean", "response_mean"])
def test_scores_and_their_gradients_equal_those_of_every_sequence_alone(pooling):
    reward = scalar("reward", pooling)
    seqs = GROUPS.select(torch.nonzero(GROUPS.response_lens).squeeze(1))
    embedded = tokens_run(reward.backbone)
    scores = sequence_scores(reward, seqs)
    assert embedded == [SHARED_TOKENS]
    alone = torch.cat(one_by_one(lambda one: sequence_scores(reward, one), seqs))
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=0)
    weights = list(reward.parameters())
    ours = torch.autograd.grad(scores.square().sum(), weights)
    for a, b in zip(ours, torch.autograd.grad(alone.square().sum(), weights), strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm()) + 1e-6
    both = outputs(reward, seqs, {"score", "token_score"}, 1.0)
    torch.testing.assert_close(both.score, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(both.token_score, token_scores(reward, seqs, share=False), atol=1e-5, rtol=0)


def test_a_score_of_the_whole_mean_counts_the_prompt_for_each_sequence():
    """By hand from the hidden states of each sequence alone."""
    reward = scalar("reward", "mean")
    hidden = [reward.trunk.hidden(one.tokens) for one in (GROUPS.select(torch.tensor([b])) for b in (0, 3, 5))]
    expected = torch.stack([(states.mean(0) @ reward.score.weight[0]) + reward.score.bias[0] for states in hidden])
    scores = sequence_scores(reward, GROUPS.select(torch.tensor([0, 3, 5])))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


# ---- where nothing is shared ----


def test_encoders_padded_rows_cut_rows_and_remembered_states_are_not_shared():
    encoder = choose_layout(disable_dropout(kit.build("bert")))
    assert not encoder.shares_prompts
    torch.testing.assert_close(
        encoder.shared_states(GROUPS).hidden, torch.cat(kit.native_hidden(encoder.model, GROUPS)), atol=1e-4, rtol=0
    )
    backbone = backbone_of(build("llama"))
    assert choose_layout(backbone).shares_prompts
    assert not Trunk(backbone, "padded").shares_prompts
    assert not Trunk(backbone, "packed", True, TokenParallel()).shares_prompts
    reward = scalar("reward", "last")
    assert shares_prompts(reward)
    reward.features = object()  # type: ignore[assignment]
    assert not shares_prompts(reward)


@pytest.mark.parametrize(
    ("kinds", "alone"),
    [
        (None, True),
        (["full_attention", "sliding_attention"], True),
        (["linear_attention", "full_attention"], False),
        (["conv", "full_attention"], False),
        (["mamba"], False),
    ],
)
def test_layers_that_carry_a_state_along_are_known_by_the_configuration(kinds, alone):
    config = MistralConfig(**SIZES)
    config.layer_types = kinds
    assert attention_alone(config) is alone


class Recurrent(nn.Module):
    """Adds to each token the sum of what is before it in its segment, which it knows from cu_seq_lens_q alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden, *args, cu_seq_lens_q=None, **kwargs):
        parts = [hidden] if cu_seq_lens_q is None else hidden.split(cu_seq_lens_q.diff().tolist(), 1)
        carried = torch.cat([part + 0.05 * (part.cumsum(1) - part) for part in parts], 1)
        if cu_seq_lens_q is not None:
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q
        return self.inner(carried, *args, **kwargs)


def test_a_layer_that_needs_whole_segments_is_seen_and_nothing_is_shared():
    model = disable_dropout(kit.build("llama"))
    model.model.layers[1] = Recurrent(model.model.layers[1])
    with pytest.warns(UserWarning, match="LlamaModel cannot be packed"):
        trunk = choose_layout(model.model)
    assert not trunk.shares_prompts
