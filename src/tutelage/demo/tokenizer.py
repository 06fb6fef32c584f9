from __future__ import annotations
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)


def build(texts):
    pre = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[^A-Za-z\s]|\s"), behavior="isolated")
    seen = set()
    for t in texts:
        seen.update(p for p, _ in pre.pre_tokenize_str(t))
    seen.update(["user", "assistant", "system", "\n"])
    vocab = {t: i for i, t in enumerate(["<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>", *sorted(seen)])}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tok.pre_tokenizer = pre
    tok.decoder = decoders.Fuse()
    t = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    t.chat_template = TEMPLATE
    return t
