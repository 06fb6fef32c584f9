"""The small files of scripts/wrong_input.py: a tiny model, data, rules and recipes, and wrong ones of each."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 128
TOPICS = ("tea", "cats", "rain", "bread", "music", "bikes", "trees", "maps")
RECIPES = {
    "sft": "sft: {batch_size: 8, epochs: 2}\ndata: {train: data/demonstrations.jsonl}\n",
    "reward_model": "reward_model: {batch_size: 8}\ndata: {train: data/pairs.jsonl}\n",
    "ppo": """\
data: {train: data/prompts.jsonl}
rollout: {prompts_per_step: 4, max_new_tokens: 6}
ppo: {epochs: 1, minibatches: 1}
reward: {rules: [{function: "rules.py:short"}]}
evaluation: {prompts: 2}
""",
}
RULES = """\
import math, pathlib, time

calls = 0


def short(prompts, responses, truths):
    return [-float(len(text)) for text in responses]


def nan_in_step_2(prompts, responses, truths):
    global calls
    calls += 1
    return [math.nan if calls > 2 else 0.0 for _ in responses]


def one_too_few(prompts, responses, truths):
    return [0.0 for _ in responses][1:]


def divides_by_zero(prompts, responses, truths):
    return [1.0 / (len(text) - len(text)) for text in responses]


def stalls_in_step_3(prompts, responses, truths):
    global calls
    calls += 1
    mark = pathlib.Path("stalled")
    if calls > 3 and not mark.exists():
        mark.touch()
        time.sleep(600)
    return short(prompts, responses, truths)
"""


def build_workspace(root: Path) -> Path:
    """Models, data, rules and recipes in an empty folder; paths in the recipes are relative to it."""
    for name in ("data", "models", "runs"):
        (root / name).mkdir()
    prompts = [f"{verb} {topic}" for verb in ("what is", "tell me of", "why") for topic in TOPICS]
    rows = [{"prompt": p, "chosen": f"it is {p.split()[-1]}.", "rejected": "no no no"} for p in prompts]
    write_rows(root, "prompts", [{"prompt": row["prompt"]} for row in rows])
    write_rows(root, "demonstrations", [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows])
    write_rows(root, "pairs", rows)
    (root / "rules.py").write_text(RULES)
    for name, text in RECIPES.items():
        head = f"algorithm: {name}\nname: {name}\noutput_dir: runs\nmodel: {{path: models/policy}}\nmax_steps: 4\n"
        (root / f"{name}.yaml").write_text(head + text)
    write_model(root / "models" / "policy")
    return root


def write_rows(root: Path, name: str, rows: list[dict]) -> None:
    (root / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(root: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (root / "data" / f"{name}.jsonl").read_text().splitlines()]


def changed(root: Path, source: str, name: str, change: Callable[[int, dict], dict]) -> None:
    """data/NAME.jsonl: the rows of another file, each passed through change(row number from 1, row)."""
    write_rows(root, name, [change(number, row) for number, row in enumerate(rows_of(root, source), 1)])


def write_model(folder: Path, *, eos: str | None = "<|end|>", pad: str | None = "<|end|>") -> None:
    """A Llama with one layer and one token per printable character."""
    tokens = ["<|unk|>", "<|end|>", "\n", *(chr(code) for code in range(32, 127))]
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<|unk|>"))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<|unk|>", eos_token=eos, pad_token=pad)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None if eos is None else 1,
        pad_token_id=None if pad is None else 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Malicious:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("unpickled"),)


def pickled_weights(root: Path) -> None:
    folder = root / "models" / "pickled"
    write_model(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))


def misspelt_column(root: Path) -> None:
    changed(root, "pairs", "misspelt", lambda n, r: {"prompt": r["prompt"], "chosen": r["chosen"], "rejcted": "no"})


def mixed_rows(root: Path) -> None:
    changed(root, "demonstrations", "mixed", lambda n, r: {"text": "it is tea."} if n in (5, 9) else r)


def empty_rows(root: Path, name: str, every: int) -> None:
    changed(root, "demonstrations", name, lambda n, r: {**r, "completion": " "} if n % every == 0 else r)


def long_rows(root: Path, name: str, every: int) -> None:
    changed(root, "prompts", name, lambda n, r: {"prompt": "why " * CONTEXT} if n % every == 0 else r)


def equal_pairs(root: Path) -> None:
    changed(root, "pairs", "equal", lambda n, r: {**r, "rejected": r["chosen"]} if n % 4 == 0 else r)


def unknown_key_recipe(root: Path) -> None:
    text = (root / "ppo.yaml").read_text()
    (root / "unknown_key.yaml").write_text(text.replace("ppo: {epochs: 1", "ppo: {cliprange: 0.1, epochs: 1"))
