"""A word-level tokenizer for the demo language, with a ChatML template whose end-of-turn token is EOS."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")

# A word carries the space before it, so that decoding is concatenation and gives the text back exactly.
_PIECE = r" ?[A-Za-z]+| ?[^A-Za-z\s]|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is every piece of `texts`, in alphabetical order after four special tokens.

    A piece is a word or a sign with the space before it. Pad, unknown and EOS differ; a rendered chat ends in EOS with
    nothing after it. Pieces that are not in `texts` become the unknown token.
    """
    splitter = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    pieces = {piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)} | {*ROLES, "\n"}
    vocabulary = {piece: index for index, piece in enumerate([PAD, UNKNOWN, START, END, *sorted(pieces)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
