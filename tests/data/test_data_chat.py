"""Chat templates: one tokenisation, boundaries that are token boundaries, EOS where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tutelage.data.chat import ChatTemplate, special_ids
from tutelage.errors import ConfigError, DataError, ModelError

Q = {"role": "user", "content": "Hi: the you"}
A = {"role": "assistant", "content": "the answer"}
R = {"role": "user", "content": "and then?"}
B = {"role": "assistant", "content": " you\n\nstop "}
CHAT = [Q, A, R, B]
MESSY = [
    {"role": "system", "content": "  Be: brief.\n"},
    {"role": "user", "content": " Human: the\n\nAssistant: a "},
    {"role": "assistant", "content": "\n the"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "you~"},
]


def _text(template: ChatTemplate, ids: list[int]) -> str:
    return str(template.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", [None, "chatml", "plain", "hh"])
@pytest.mark.parametrize("chat", [CHAT[:2], CHAT, MESSY])
def test_pieces_decode_to_the_rendering_of_the_whole(
    tiny_tokenizer: Any, name: str | None, chat: list[dict[str, str]]
) -> None:
    template = ChatTemplate(tiny_tokenizer, name)
    if name == "hh" and chat is MESSY:
        with pytest.raises(DataError, match="has no role system"):
            template.encode_conversation(chat)
        return
    encoded = template.encode_conversation(chat)
    whole = template.render(chat)
    closing = "<|im_end|>" if name in ("plain", "hh") else ""
    assert (
        _text(template, encoded.prompt + encoded.response) == whole.removesuffix("\n" if not closing else "") + closing
    )
    assert encoded.response[-1] == 2
    assert encoded.trained[-1] is True


def test_response_boundary_is_a_token_boundary_where_a_merge_crosses_it(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, "hh")
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "the"}]
    joined = tiny_tokenizer("Assistant: the", add_special_tokens=False)["input_ids"]
    assert ": " in tiny_tokenizer.convert_ids_to_tokens(joined)  # the whole text has a token across the boundary
    encoded = template.encode_conversation(chat)
    assert _text(template, encoded.prompt) == "\n\nHuman: x\n\nAssistant:"
    assert tiny_tokenizer.convert_ids_to_tokens(encoded.response) == [" the", "<|im_end|>"]


@pytest.mark.parametrize("name", [None, "chatml", "plain", "hh"])
def test_prompt_ids_and_sampled_ids_are_training_ids(tiny_tokenizer: Any, name: str | None) -> None:
    template = ChatTemplate(tiny_tokenizer, name)
    for cut in (1, 3):
        whole = template.encode_conversation(CHAT[: cut + 1], "completion")
        assert template.encode_prompt(CHAT[:cut]) == whole.prompt
        assert template.encode_response(CHAT[cut]["content"]) == whole.response
    first, both = template.encode_conversation(CHAT[:2]), template.encode_conversation(CHAT)
    assert both.prompt == first.prompt
    if name in (None, "chatml"):
        assert both.response[: len(first.response)] == first.response


def test_holes_and_trained_eos(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    encoded = template.encode_conversation(CHAT)
    trained = [index for index, keep in zip(encoded.response, encoded.trained, strict=True) if keep]
    holes = [index for index, keep in zip(encoded.response, encoded.trained, strict=True) if not keep]
    assert _text(template, encoded.prompt) == "<|im_start|>user\nHi: the you<|im_end|>\n<|im_start|>assistant\n"
    assert _text(template, trained) == "the answer<|im_end|> you\n\nstop <|im_end|>"
    assert _text(template, holes) == "\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.trained[0]


def test_tool_turns_are_holes(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    encoded = template.encode_completion(MESSY[:2], MESSY[2:])
    trained = [index for index, keep in zip(encoded.response, encoded.trained, strict=True) if keep]
    assert encoded.prompt == template.encode_prompt(MESSY[:2])
    assert _text(template, trained) == "\n the<|im_end|>you~<|im_end|>"


def test_loss_on_all_trains_every_token_but_the_first(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    some, everything = template.encode_conversation(CHAT), template.encode_conversation(CHAT, "all")
    assert everything.prompt + everything.response == some.prompt + some.response
    assert len(everything.prompt) == 1
    assert all(everything.trained)


def test_turns_after_the_last_answer_are_left_out(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    assert template.encode_conversation([*CHAT, R]) == template.encode_conversation(CHAT)


def test_eos_is_appended_once(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, "plain")
    assert template.encode_response("ok")[-1] == 2
    assert template.encode_response("ok<|im_end|>") == template.encode_response("ok")
    assert template.encode_response("ok", finished=False) == template.encode_response("ok")[:-1]
    assert template.encode_text("ok") == (
        template.encode_response("ok")[:1],
        template.encode_response("ok")[1:],
        [True] * 2,
    )


def test_decode_response_inverts_encode_response(tiny_tokenizer: Any) -> None:
    for name in (None, "plain", "hh"):
        template = ChatTemplate(tiny_tokenizer, name)
        assert template.decode_response(template.encode_response(" the you ")) == " the you "
        assert template.decode_response([*template.encode_response("yes"), 50, 51]) == "yes"


def test_hh_gives_the_real_text_back(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer, "hh")
    assert template.render(CHAT[:2]) == "\n\nHuman: Hi: the you\n\nAssistant: the answer"
    assert template.render_with_response([Q], "the answer") == template.render(CHAT[:2])


# ---- resolution


def test_template_resolution(tiny_tokenizer: Any, tiny_gpt2_folder: Path, tmp_path: Path) -> None:
    gpt2 = AutoTokenizer.from_pretrained(tiny_gpt2_folder)
    assert ChatTemplate(tiny_tokenizer).name == "tokenizer"
    assert ChatTemplate(gpt2).name == "plain"
    assert ChatTemplate(gpt2, "hh").name == "hh"
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = ChatTemplate(gpt2, str(path))
    assert template.render(CHAT[:2]) == "[user]Hi: the you[assistant]the answer"
    with pytest.raises(ConfigError, match="Did you mean chatml"):
        ChatTemplate(gpt2, "chatlm")


def test_chatml_ends_turns_with_eos_where_the_vocabulary_has_no_im_end(tiny_gpt2_folder: Path) -> None:
    gpt2 = AutoTokenizer.from_pretrained(tiny_gpt2_folder)
    template = ChatTemplate(gpt2, "chatml")
    encoded = template.encode_conversation(CHAT)
    assert (template.end_id, template.eos_ids) == (0, (0,))
    assert [i for i, keep in zip(encoded.response, encoded.trained, strict=True) if keep].count(0) == 2


def test_template_that_strips_answers(tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    template = ChatTemplate(tiny_tokenizer, str(path))
    encoded = template.encode_conversation(CHAT)
    assert (template.trims, template.response_prefix) == (True, " ")
    assert _text(template, encoded.prompt + encoded.response) == template.render(CHAT)
    assert encoded.response[-len(template.encode_response(B["content"])) :] == template.encode_response("you\n\nstop")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ 'model:' if add_generation_prompt }}",
        "{% for m in messages %}{{ m.role }};{% endfor %}",
    ],
)
def test_template_that_cannot_be_cut_is_refused(tiny_tokenizer: Any, tmp_path: Path, source: str) -> None:
    (tmp_path / "t.jinja").write_text(source)
    with pytest.raises(ModelError, match="cannot be cut into turns"):
        ChatTemplate(tiny_tokenizer, str(tmp_path / "t.jinja"))


def test_template_that_rewrites_earlier_answers_is_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% else %}"
        "{{ m.content.split('!')[-1] }}{% endif %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    template = ChatTemplate(tiny_tokenizer, str(tmp_path / "t.jinja"))
    template.encode_conversation(CHAT)
    with pytest.raises(DataError, match="depends on the text of an answer"):
        template.encode_conversation([Q, {"role": "assistant", "content": "think! say"}, R, B])


def test_generation_prompt_that_depends_on_the_turn_is_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% if messages | length > 2 %}(again){% endif %}{% endif %}"
    )
    template = ChatTemplate(tiny_tokenizer, str(tmp_path / "t.jinja"))
    template.encode_conversation(CHAT[:2])
    with pytest.raises(DataError, match="generation prompt differs"):
        template.encode_conversation(CHAT, "completion")


# ---- BOS, [CLS], SentencePiece


def _llama_like(prepend: str, bos_in_template: bool) -> PreTrainedTokenizerFast:
    letters = [chr(code) for code in range(33, 127)]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", "▁", "\n", *letters])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme=prepend, split=False)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    start = "{{ bos_token }}" if bos_in_template else ""
    tokenizer.chat_template = start + (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    return tokenizer


def test_bos_is_not_doubled() -> None:
    tokenizer = _llama_like("never", bos_in_template=True)
    assert tokenizer("a")["input_ids"][0] == 1
    own = ChatTemplate(tokenizer)
    assert own.encode_prompt([Q]).count(1) == 1
    assert own.render([Q]) == "<s>[INST] Hi: the you [/INST]"
    assert own.response_prefix == " "
    for name in ("plain", "hh", "chatml"):
        ids = ChatTemplate(tokenizer, name).encode_prompt([Q])
        assert ids[0] == 1
        assert ids.count(1) == 1


def test_own_template_without_bos_stays_without() -> None:
    assert 1 not in ChatTemplate(_llama_like("never", bos_in_template=False)).encode_prompt([Q])


def test_pieces_of_a_sentencepiece_tokenizer_get_no_space_of_their_own() -> None:
    template = ChatTemplate(_llama_like("first", bos_in_template=True))
    encoded = template.encode_conversation([Q, A, R, A])
    spaces = encoded.prompt + encoded.response
    text = "".join(template.tokenizer.convert_ids_to_tokens(spaces)).replace("▁", " ")
    assert text == template.render([Q, A, R, A])


def test_encoder_tokenizer_keeps_its_frame(tiny_bert_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert_folder)
    template = ChatTemplate(tokenizer, "hh")
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    encoded = template.encode_conversation(CHAT[:2])
    assert (
        encoded.prompt + encoded.response == tokenizer("\n\nHuman: Hi: the you\n\nAssistant: the answer")["input_ids"]
    )
    assert (encoded.prompt[0], encoded.response[-1], template.eos_ids) == (cls, sep, ())
    cut = template.truncate_prompt(encoded.prompt, 3)
    assert cut == [cls, *encoded.prompt[-2:]]
    assert template.truncate_response(encoded.response, 2) == [encoded.response[0], sep]
    assert template.encode_response("the", finished=False)[-1] == sep


def test_truncation_loses_the_start_of_prompts_and_the_end_of_responses(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    assert template.truncate_prompt([5, 6, 7, 8], 2) == [7, 8]
    assert template.truncate_response([5, 6, 7, 2], 2) == [5, 6]
    assert template.truncate_prompt([5, 6], 2) == [5, 6]


# ---- EOS facts


def test_special_ids_of_the_variants(tokenizer_variants: dict[str, Any]) -> None:
    facts = {name: special_ids(t) for name, t in tokenizer_variants.items() if name != "no_eos"}
    assert {name: (f.eos_ids, f.pad_id) for name, f in facts.items()} == {
        "pad_is_eos": ((2,), 2),
        "pad_is_not_eos": ((2,), 3),
        "no_pad": ((2,), None),
    }
    with pytest.raises(ModelError, match="has no EOS token") as caught:
        special_ids(tokenizer_variants["no_eos"])
    assert "eos_token" in caught.value.fix
    with pytest.raises(ModelError, match="has no EOS token"):
        ChatTemplate(tokenizer_variants["no_eos"])


def test_ids_do_not_depend_on_the_pad_token(tokenizer_variants: dict[str, Any]) -> None:
    encoded = [ChatTemplate(tokenizer_variants[n]).encode_conversation(CHAT) for n in ("pad_is_eos", "pad_is_not_eos")]
    assert encoded[0] == encoded[1] == ChatTemplate(tokenizer_variants["no_pad"]).encode_conversation(CHAT)


def test_several_eos_ids_of_a_model(tiny_llama_two_eos_folder: Path, tokenizer_variants: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_two_eos_folder)
    config = GenerationConfig.from_pretrained(tiny_llama_two_eos_folder)
    facts = special_ids(tokenizer, config)
    assert facts.eos_ids == (2, 0)
    template = ChatTemplate(tokenizer, special=facts)
    assert template.eos_ids == (2, 0)
    assert template.decode_response([60, 0, 61]) == tokenizer.decode([60])
    assert special_ids(tokenizer_variants["no_eos"], config).eos_ids == (2, 0)


def test_config_that_names_an_ordinary_token_as_eos_is_refused(tiny_tokenizer: Any) -> None:
    letter = tiny_tokenizer.convert_tokens_to_ids("a")
    with pytest.raises(ModelError, match=f"names {letter} as an EOS id, which is the ordinary token 'a'"):
        special_ids(tiny_tokenizer, SimpleNamespace(eos_token_id=letter))


def test_end_of_turn_token_of_the_template_is_an_eos(make_tokenizer: Callable[..., Any]) -> None:
    template = ChatTemplate(make_tokenizer(eos="<|endoftext|>", pad=None))
    assert (template.end_id, template.eos_ids) == (2, (0, 2))
    assert template.encode_response("ok")[-1] == 2


# ---- a real tokenizer


@pytest.mark.shared
@pytest.mark.parametrize("name", [None, "chatml", "hh", "plain"])
def test_smollm2(small_models: Path, name: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small_models / "smollm2-135m-instruct")
    template = ChatTemplate(tokenizer, name)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == template.end_id == 2
    chat = [Q, {"role": "assistant", "content": "Ünïcode\n\n  and 12,345 …"}, R, B]
    encoded = template.encode_conversation(chat)
    closing = "<|im_end|>" if name in ("plain", "hh") else ""
    expected = template.render(chat).removesuffix("\n" if not closing else "") + closing
    assert _text(template, encoded.prompt + encoded.response) == expected
    assert encoded.prompt == template.encode_prompt(chat[:1])
    if name is None:
        whole = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        assert encoded.prompt == list(whole)
