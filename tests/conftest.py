"""Fixtures every test may use: tiny tokenizers and model folders built offline, and the optional real data and models.

Tiny models have 2 layers, head_dim 32, a vocabulary of about 120 and fixed seeds.  Their weights are drawn wide, so
that logits are far from uniform and a wrong position or mask moves a logprob by much more than a tolerance.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Some merges cross the places where a careless tokenisation would lose a boundary: ": ", " the", two newlines.
MERGES = [
    ("\n", "\n"),
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("a", "n"),
    ("e", "r"),
    ("o", "u"),
    (":", " "),
    (" ", "a"),
    (" ", "th"),
    (" ", "the"),
    ("y", "ou"),
    (" ", "you"),
]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


def _characters() -> list[str]:
    return ["\n", *(chr(code) for code in range(32, 127))]


def _character_bpe(specials: tuple[str, ...]) -> Tokenizer:
    tokens = [*specials, *_characters(), *(first + second for first, second in MERGES)]
    vocab = {token: index for index, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<|endoftext|>"))
    inner.decoder = decoders.Fuse()
    return inner


def build_tokenizer(*, eos: str | None = "<|im_end|>", pad: str | None = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A character-level BPE over printable ASCII: 4 special tokens (ids 0..3), 96 characters, 13 merges, reversible.

    `<|endoftext|>` (0) doubles as the unknown token; `<|im_start|>` is 1, `<|im_end|>` 2, `<|pad|>` 3.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_character_bpe(SPECIALS),
        unk_token="<|endoftext|>",
        eos_token=eos,
        pad_token=pad,
        additional_special_tokens=list(SPECIALS[1:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def build_bert_tokenizer() -> PreTrainedTokenizerFast:
    """Another vocabulary, lower-case words and characters, `[CLS] ... [SEP]` around every text, no EOS, no template."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(c for c in _characters() if not c.isspace() and not c.isupper())]
    tokens += ["human", "assistant", "user", "the", "you", "is", "good", "bad", "no", "yes"]
    inner = Tokenizer(models.WordPiece(vocab=_wordpieces(tokens), unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), behavior="removed")
    inner.decoder = decoders.WordPiece()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def _wordpieces(tokens: list[str]) -> dict[str, int]:
    pieces = [*tokens, *(f"##{t}" for t in tokens if len(t) == 1)]
    return {token: index for index, token in enumerate(pieces)}


def build_gpt2_tokenizer() -> PreTrainedTokenizerFast:
    """As the real gpt2's: one special token, `<|endoftext|>`, which is BOS and EOS; no pad token, no chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_character_bpe(("<|endoftext|>",)),
        unk_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _seeded(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _llama(eos_token_id: int | list[int], seed: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=len(build_tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    return _seeded(lambda: LlamaForCausalLM(config), seed)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """`make_tokenizer(eos=..., pad=...)`: the tiny ChatML tokenizer with these special tokens (None: without)."""
    return build_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny ChatML tokenizer with pad = eos = `<|im_end|>` (id 2), as SmolLM2 has it."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_variants() -> dict[str, PreTrainedTokenizerFast]:
    """The same vocabulary with other special tokens. (Several EOS ids are a model's: `tiny_llama_two_eos_folder`.)"""
    return {
        "pad_is_eos": build_tokenizer(),
        "pad_is_not_eos": build_tokenizer(pad="<|pad|>"),
        "no_pad": build_tokenizer(pad=None),
        "no_eos": build_tokenizer(eos=None, pad="<|pad|>"),
    }


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with 2 query heads on 1 key/value head and tied embeddings; pad = eos = 2; ChatML template."""
    return _save(_llama(2, seed=11), build_tokenizer(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_llama_two_eos_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose config and generation config name two EOS ids: `<|im_end|>` (2) and `<|endoftext|>` (0)."""
    return _save(_llama([2, 0], seed=11), build_tokenizer(), tmp_path_factory.mktemp("llama_two_eos"))


@pytest.fixture(scope="session")
def tiny_gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with learned positions and dropout 0.1; EOS = BOS = 0, no pad token, no chat template."""
    tokenizer = build_gpt2_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.15,
    )
    return _save(_seeded(lambda: GPT2LMHeadModel(config), 12), tokenizer, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def tiny_bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT encoder with another tokenizer (`[CLS] ... [SEP]`, pad 0, no EOS), dropout 0.1, 256 positions."""
    tokenizer = build_bert_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=256,
        pad_token_id=0,
        initializer_range=0.15,
    )
    return _save(_seeded(lambda: BertModel(config), 13), tokenizer, tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with `hh-rlhf/` and `gsm8k/`: $TUTELAGE_SHARED, or `../shared/data` beside the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("TUTELAGE_SHARED", default))
    if not (folder / "hh-rlhf").is_dir():
        pytest.skip(f"no real preference data: {folder} has no hh-rlhf folder (set TUTELAGE_SHARED)")
    return folder


@pytest.fixture(scope="session")
def small_models() -> Path:
    """The folder with `smollm2-135m-instruct/` and `minilm-l6/`: $TUTELAGE_MODELS, or `~/.cache/small-models`."""
    folder = Path(os.environ.get("TUTELAGE_MODELS", Path.home() / ".cache" / "small-models"))
    missing = [name for name in ("smollm2-135m-instruct", "minilm-l6") if not (folder / name / "config.json").is_file()]
    if missing:
        pytest.skip(f"no small real models: {folder} lacks {', '.join(missing)} (set TUTELAGE_MODELS)")
    return folder
