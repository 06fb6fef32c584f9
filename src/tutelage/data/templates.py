"""Chat templates as Jinja text: three built in, a file, or the tokenizer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tutelage.errors import ConfigError, ModelError, closest

# <|im_end|> ends every turn; where the vocabulary lacks it, EOS takes its place (`turn_end`).
_CHATML = (
    "{{ text_start }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + turn_end + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The contents and nothing else: an answer follows its prompt directly, any other turn after the first starts a line.
_PLAIN = (
    "{{ text_start }}{% for m in messages %}{% if not loop.first and m['role'] != 'assistant' %}{{ '\n' }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)
_HH = (
    "{{ text_start }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '\n\nHuman: ' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '\n\nAssistant: ' + m['content'] }}"
    "{% else %}{{ raise_exception('the hh template has no role ' + m['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
)

BUILT_IN: dict[str, str] = {"chatml": _CHATML, "plain": _PLAIN, "hh": _HH}


def resolve_template(tokenizer: Any, wanted: str | None) -> tuple[str, str, bool]:
    """(name, Jinja text, whether it is built in): a built-in name, else a file, else the tokenizer's own, else plain.

    Raises ConfigError when `wanted` is neither a built-in name nor a file, ModelError when the tokenizer has several
    templates and none of them is the default.
    """
    if wanted is None:
        own = getattr(tokenizer, "chat_template", None)
        if not own:
            return "plain", _PLAIN, True
        try:
            return "tokenizer", tokenizer.get_chat_template(), False
        except ValueError as error:
            raise ModelError(
                f"the tokenizer has several chat templates and no default: {error}",
                fix="save the one you mean as a file and give model.chat_template=FILE",
            ) from error
    if wanted in BUILT_IN:
        return wanted, BUILT_IN[wanted], True
    path = Path(wanted).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"chat_template {wanted!r} is neither a file nor one of {', '.join(BUILT_IN)}.{closest(wanted, BUILT_IN)}",
            fix="give a built-in name or the path of a Jinja file",
        )
    return str(path), path.read_text(encoding="utf-8"), False
