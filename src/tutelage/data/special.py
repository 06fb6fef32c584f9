"""The facts about EOS and pad, read once and passed on; nothing else in the package guesses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tutelage.errors import ModelError


@dataclass(frozen=True)
class SpecialIds:
    """eos_ids: every id that ends a response, the tokenizer's own first.  pad_id may equal one of them, or be None."""

    eos_ids: tuple[int, ...]
    pad_id: int | None


def special_ids(tokenizer: Any, *configs: Any) -> SpecialIds:
    """EOS ids of the tokenizer and of any generation or model configs (which may name several), in that order.

    Nothing is ever padded with `pad_id`, so its absence is fine, and so is pad = eos.
    Raises ModelError when nobody names an EOS, or a config names an id that is an ordinary token of this tokenizer
    (generation would stop in the middle of a word).
    """
    own = getattr(tokenizer, "eos_token_id", None)
    ids = [] if own is None else [int(own)]
    marked = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for config in configs:
        for index in _as_list(getattr(config, "eos_token_id", None)):
            if index not in marked:
                raise ModelError(
                    f"{type(config).__name__} names {index} as an EOS id, which is the ordinary token "
                    f"{tokenizer.convert_ids_to_tokens(index)!r} of the tokenizer (its EOS is {own})",
                    fix="set eos_token_id in config.json and generation_config.json to ids of special tokens",
                )
            ids.append(index)
    if not ids:
        raise ModelError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r} has no EOS token, "
            "so no response could ever end",
            fix="set eos_token in tokenizer_config.json to a special token of its vocabulary, or use another tokenizer",
        )
    pads = [getattr(source, "pad_token_id", None) for source in (tokenizer, *configs)]
    return SpecialIds(tuple(dict.fromkeys(ids)), next((int(pad) for pad in pads if pad is not None), None))


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(index) for index in value] if isinstance(value, list | tuple) else [int(value)]


def added_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer itself puts before and after a text: ([BOS], []), ([CLS], [SEP]) or nothing."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def segment_anchor(tokenizer: Any) -> str:
    """Text of a special token to put before a piece of text (and take its id off again), or nothing.

    SentencePiece tokenizers open a text with a space of their own; behind a special token they do not.  Without the
    anchor the pieces "a" and "b" would decode to "a b".  Tokenizers that lose white space anyway need no anchor.
    """

    def joined(anchor: str) -> str:
        ids = [tokenizer(anchor + text, add_special_tokens=False)["input_ids"] for text in ("a", "b")]
        return str(tokenizer.decode([index for piece in ids for index in piece[1 if anchor else 0 :]]))

    if joined("") == "ab":
        return ""
    for anchor in (tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token):
        single = anchor and len(tokenizer(anchor + "a", add_special_tokens=False)["input_ids"]) == 2
        if single and joined(anchor) == "ab":
            return str(anchor)
    return ""
