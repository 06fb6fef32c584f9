"""What ends a response: EOS tokens, stop tokens, stop strings and the length limit."""

from __future__ import annotations

import pytest
import torch
from rollout_kit import PROMPTS, make_engine, make_model, make_prompts, rows_of
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tutelage.rollout.inprocess import stopping as stopping_module
from tutelage.rollout.inprocess.stopping import Stopping


def forced(tokens, byte_tokenizer, **kwargs):
    """One prompt answered by a model whose head always puts everything on the given continuation."""
    model = make_model("gpt2")
    emitted = {}

    def head(module, args, output):
        output.logits[:] = 0.0
        step = len(emitted)
        emitted[step] = True
        output.logits[..., tokens[min(step, len(tokens) - 1)]] = 60.0

    model.register_forward_hook(head)
    return make_engine(model, byte_tokenizer, **kwargs).generate(make_prompts([[1, 2]]))


def ids(text, byte_tokenizer):
    return byte_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_eos_is_part_of_the_response_trained_and_not_in_the_text(byte_tokenizer):
    rollout = forced([*ids("ab", byte_tokenizer), 256, 66], byte_tokenizer)
    assert rollout.sequences.response_rows() == [[*ids("ab", byte_tokenizer), 256]]
    assert rollout.texts == ("ab",)
    assert rollout.finished.tolist() == [True]
    assert rollout.sequences.trained.flat.tolist() == [True] * 3


def test_several_eos_ids_and_one_that_the_tokenizer_does_not_call_special(byte_tokenizer):
    (z,) = ids("z", byte_tokenizer)
    rollout = forced([*ids("abz", byte_tokenizer), 66], byte_tokenizer, eos_ids=(256, z))
    assert rollout.sequences.response_rows() == [ids("abz", byte_tokenizer)]
    assert rollout.texts == ("ab",)


def test_a_pad_token_is_an_ordinary_token(byte_tokenizer):
    rollout = forced([257, *ids("a", byte_tokenizer), 256], byte_tokenizer)
    assert rollout.sequences.response_rows() == [[257, *ids("a", byte_tokenizer), 256]]


def test_a_stop_token_ends_and_is_kept(byte_tokenizer):
    (q,) = ids("q", byte_tokenizer)
    rollout = forced([*ids("abq", byte_tokenizer), 66], byte_tokenizer, stop_token_ids=(q,))
    assert rollout.texts == ("abq",)
    assert rollout.finished.tolist() == [True]


def test_truncated_is_not_finished(byte_tokenizer):
    rollout = forced(ids("abc", byte_tokenizer), byte_tokenizer, max_new_tokens=3)
    assert rollout.finished.tolist() == [False]
    rollout = forced([*ids("ab", byte_tokenizer), 256], byte_tokenizer, max_new_tokens=3)
    assert rollout.finished.tolist() == [True]


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("one two END three", ("END",), "one two END"),
        ("abc\n\nHuman: hi", ("Human:", "\n\nHuman:"), "abc\n\nHuman:"),
        ("a b c d", ("b ",), "a b "),
        ("x €uro €", ("€",), "x €"),
        ("aEaENaEND", ("END",), "aEaENaEND"),
        ("none here", ("zzz",), "none here"),
    ],
)
def test_stop_strings_span_tokens_and_their_text_is_kept(text, stop, kept, byte_tokenizer):
    tokens = ids(text, byte_tokenizer)
    rollout = forced(tokens, byte_tokenizer, stop=stop, max_new_tokens=len(tokens))
    assert rollout.texts == (kept,)
    assert rollout.sequences.response_rows() == [ids(kept, byte_tokenizer)]
    assert rollout.finished.tolist() == [text != "none here"]


def test_a_stop_string_may_end_in_a_space_that_the_next_token_brings():
    """A word-piece decoder puts the space between two tokens: neither token's own text has it."""
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "yes": 1, "no": 2, "##t": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    stopping = Stopping(PreTrainedTokenizerFast(tokenizer_object=backend), (), ("no ",), torch.device("cpu"))
    tokens_XT = torch.tensor([[1, 2, 1], [1, 2, 3], [2, 1, 1]])
    rows, alive = torch.tensor([2, 0, 1]), torch.tensor([False, True, True])
    assert stopping.ended(tokens_XT[rows, 1], tokens_XT, rows, alive, 2).tolist() == [False, False, False]
    assert stopping.ended(tokens_XT[rows, 2], tokens_XT, rows, alive, 3).tolist() == [False, True, False]


def test_a_stop_string_may_be_a_special_token(byte_tokenizer):
    rollout = forced([*ids("hi", byte_tokenizer), 258, 66], byte_tokenizer, stop=("<user>",))
    assert rollout.sequences.response_rows() == [[*ids("hi", byte_tokenizer), 258]]
    assert rollout.texts == ("hi",)


def test_a_stop_string_in_the_prompt_or_across_its_end_does_not_count(byte_tokenizer):
    model = make_model("llama")
    prompts = make_prompts([ids("xEN", byte_tokenizer), ids("END", byte_tokenizer)])
    plain = make_engine(model, byte_tokenizer).generate(prompts)
    stopped = make_engine(model, byte_tokenizer, stop=("END",)).generate(prompts)
    assert rows_of(stopped) == rows_of(plain)


def test_only_rows_that_may_have_met_a_stop_string_are_decoded(byte_tokenizer, monkeypatch):
    seen = []
    original = stopping_module.decode_rows
    engine = make_engine(make_model("llama"), byte_tokenizer, stop=("#",), max_new_tokens=30)

    def counting(decoder, rows, **kwargs):
        seen.append([row[-1] for row in rows])
        return original(decoder, rows, **kwargs)

    monkeypatch.setattr(stopping_module, "decode_rows", counting)
    rollout = engine.generate(make_prompts(PROMPTS, n=8))
    sampled = sum(rollout.sequences.response_lens.tolist())
    tails = sum(map(len, seen[1:]))
    assert 0 < tails < sampled
    (hash_id,) = ids("#", byte_tokenizer)
    broken = {i for i in range(256) if "\ufffd" in byte_tokenizer.decode([i])}
    assert {token for rows in seen[1:] for token in rows} <= broken | {hash_id}
