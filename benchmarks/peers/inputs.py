"""What both sides of a row are given: a recipe for Tutelage, and the token ids that it makes of the data for the peer.

So both run the same tokens in the same order.  Texts are real: hh-rlhf pairs and GSM8K questions; the tiny runs use the
sentences of the demo.  A specification is a dict that goes to both workers as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
)

from tutelage.build.data import StageData, stage_data, training_source
from tutelage.config import AnyConfig, load_checked
from tutelage.demo.language import every_sentence
from tutelage.types import Pairs, Sequences

LR = 1e-6
PPO_TOKENS = 2048
"""Of a micro-batch: about the 8 rows that TRL takes there."""
GRPO_TOKENS = 2400
"""Two groups of 8 responses, each with its prompt once, which take less memory than TRL's 8 rows."""
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Sizes:
    """rows, batch: of SFT, reward model and DPO: demonstrations or pairs, and how many of them an update has.

    micro     rows (of pairs: pairs) that a peer runs through the model at once; it accumulates over them.
    prompts, lengths  of the generation rows: shortest and longest response.
    grpo      prompts, samples of each, tokens.    ppo: prompts, tokens, epochs, mini-batches.
    longest   prompt tokens and response tokens of the pairs, and prompt tokens of everything that generates.
    """

    rows: int = 16
    batch: int = 8
    micro: int = 4
    prompts: int = 64
    lengths: tuple[int, int] = (8, 256)
    grpo: tuple[int, int, int] = (8, 8, 128)
    ppo: tuple[int, int, int, int] = (32, 64, 1, 4)
    longest: tuple[int, int, int] = (384, 128, 128)

    @classmethod
    def quick(cls) -> Sizes:
        return cls(
            rows=4, batch=2, micro=1, prompts=6, lengths=(2, 9), grpo=(2, 2, 6), ppo=(4, 6, 1, 2), longest=(64, 32, 64)
        )


@dataclass(frozen=True)
class Source:
    """model: the policy's folder; reward: an encoder's, None: a tiny one is made; hh, gsm8k: files of rows, None: made.

    Everything that is written goes below `scratch`.
    """

    model: Path
    reward: Path | None
    hh: Path | None
    gsm8k: Path | None
    scratch: Path
    dtype: str
    threads: int
    seed: int
    sizes: Sizes

    @property
    def tiny(self) -> bool:
        return self.hh is None

    @property
    def template(self) -> str:
        return "plain" if self.tiny else "hh"


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return found


def pad_id(tokenizer: Any) -> int:
    """A special token that is not the EOS: transformers tells padding from text by the id."""
    wanted = [tokenizer.pad_token_id, *tokenizer.all_special_ids]
    return next((i for i in wanted if i is not None and i != tokenizer.eos_token_id), tokenizer.eos_token_id)


# ---- files


def pairs_file(source: Source) -> Path:
    if source.hh is not None:
        return source.hh
    texts = every_sentence()
    rows = [
        {"prompt": texts[i], "chosen": texts[-1 - i], "rejected": texts[-2 - i - i % 3]}
        for i in range(0, 3 * max(source.sizes.rows, source.sizes.prompts), 3)
    ]
    return written(source.scratch / "pairs.jsonl", rows)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path


def reward_start(source: Source) -> Path:
    """The policy's weights as a sequence classifier with one label, its head drawn at random: both sides read it."""
    folder = source.scratch / "classifier"
    if not (folder / "config.json").exists():
        tokenizer = tokenizer_of(source.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(source.seed)
            model = LlamaForSequenceClassification.from_pretrained(
                source.model, num_labels=1, pad_token_id=pad_id(tokenizer), dtype=torch.float32
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def encoder_reward(source: Source) -> Path:
    """The encoder with a random head of one label, frozen on both sides: its cost is that of a trained one."""
    folder = source.scratch / "encoder"
    if not (folder / "config.json").exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(source.seed)
            if source.reward is not None:
                tokenizer = tokenizer_of(source.reward)
                model = BertForSequenceClassification.from_pretrained(source.reward, num_labels=1, dtype=torch.float32)
            else:
                tokenizer = tokenizer_of(source.model)
                model = BertForSequenceClassification(tiny_encoder(len(tokenizer)))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def tiny_encoder(vocabulary: int) -> BertConfig:
    about: Any = BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
    )
    about.num_labels = 1
    found: BertConfig = about
    return found


# ---- recipes


def recipe(source: Source, name: str, algorithm: str, **sections: Any) -> tuple[AnyConfig, StageData, dict[str, Any]]:
    """The recipe as a file, its config and data, and what every specification has."""
    body = {
        "algorithm": algorithm,
        "name": name,
        "seed": source.seed,
        "output_dir": str(source.scratch / "runs"),
        **sections,
    }
    body["optim"] = {"lr": LR, "schedule": "constant"} | body.get("optim", {})
    body["model"] = {"path": str(source.model), "dtype": source.dtype, "chat_template": source.template} | body.get(
        "model", {}
    )
    path = source.scratch / f"{name}.yaml"
    path.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf8")
    cfg = load_checked(str(path))[0].config
    tokenizer = tokenizer_of(source.model)
    optim: Any = cfg.optim
    spec = {
        "work": name,
        "recipe": str(path),
        "model": str(source.model),
        "dtype": source.dtype,
        "threads": source.threads,
        "seed": source.seed,
        "scratch": str(source.scratch),
        "pad_id": pad_id(tokenizer),
        "optimiser": {"lr": optim.lr, "eps": optim.eps, "max_grad_norm": optim.max_grad_norm, "weight_decay": 0.0},
    }
    return cfg, stage_data(cfg), spec


def pair_rows(source: Source) -> dict[str, Any]:
    prompt, response, _ = source.sizes.longest
    return {
        "train": str(pairs_file(source)),
        "eval_fraction": 0.0,
        "limit": 8 * source.sizes.rows,
        "max_prompt_tokens": prompt,
        "max_response_tokens": response,
        "max_bad_fraction": 1.0,
    }


def prompt_rows(source: Source, file: Path, prompts: int) -> dict[str, Any]:
    return {
        "train": str(file),
        "eval_fraction": 0.0,
        "limit": 8 * prompts,
        "max_prompt_tokens": source.sizes.longest[2],
        "max_bad_fraction": 1.0,
    }


def epoch(cfg: AnyConfig, data: StageData, source: Source) -> tuple[torch.Tensor, dict[str, int]]:
    """Indices of the first `rows` rows of a pass, in its order, and the sizes that both sides keep to."""
    batch, rows = source.sizes.batch, source.sizes.rows
    index = torch.cat(list(training_source(cfg, len(data.prepared.train))[0]))[:rows]
    if len(index) < rows:
        raise SystemExit(f"error: {rows} rows are asked for, {len(index)} fit\n  fix: lower --rows, or give more data")
    return index, {"rows": rows, "batch": batch, "micro": min(source.sizes.micro, batch)}


def ids(sequences: Sequences) -> tuple[list[list[int]], list[list[int]]]:
    return sequences.prompt_rows(), sequences.response_rows()


# ---- one specification for each kind of work


def sft(source: Source) -> dict[str, Any]:
    stage = {"batch_size": source.sizes.batch, "loss_on": "completion"}
    cfg, data, spec = recipe(source, "sft", "sft", data=pair_rows(source), sft=stage)
    index, sizes = epoch(cfg, data, source)
    prompts, responses = ids(data.prepared.train.select(index).sequences)
    rows = [
        {"input_ids": [*p, *r], "labels": [-100] * len(p) + list(r)} for p, r in zip(prompts, responses, strict=True)
    ]
    return {**spec, **sizes, "data": rows}


def reward_model(source: Source) -> dict[str, Any]:
    start = reward_start(source)
    stage = {"batch_size": source.sizes.batch, "centring": 0.0, "centre_on_chosen": False, "pooling": "last"}
    cfg, data, spec = recipe(
        source,
        "reward_model",
        "reward_model",
        model={"path": str(start)},
        data=pair_rows(source),
        reward_model=stage,
    )
    rows, sizes = pairs(cfg, data, source)
    whole = [{f"{side}_ids": row["prompt_ids"] + row[f"{side}_ids"] for side in ("chosen", "rejected")} for row in rows]
    return {**spec, **sizes, "model": str(start), "data": whole}


def dpo(source: Source) -> dict[str, Any]:
    cache = source.scratch / "reference.safetensors"
    cache.unlink(missing_ok=True)
    cfg, data, spec = recipe(
        source,
        "dpo",
        "dpo",
        data=pair_rows(source),
        dpo={"batch_size": source.sizes.batch, "beta": 0.1, "reference_cache": str(cache)},
        evaluation={"distance_prompts": 0},
    )
    rows, sizes = pairs(cfg, data, source)
    return {**spec, **sizes, "beta": 0.1, "data": rows}


def pairs(cfg: AnyConfig, data: StageData, source: Source) -> tuple[list[dict[str, list[int]]], dict[str, int]]:
    index, sizes = epoch(cfg, data, source)
    chosen: Pairs = data.prepared.train.select(index)
    (prompts, good), (others, bad) = ids(chosen.chosen), ids(chosen.rejected)
    assert prompts == others, "both answers of a pair have one prompt"
    rows = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in zip(prompts, good, bad, strict=True)]
    return rows, sizes


def grpo(source: Source) -> dict[str, Any]:
    prompts, samples, tokens = source.sizes.grpo
    return rollout_step(source, prompts, samples, tokens)


def rollout_step(
    source: Source, prompts: int, samples: int, tokens: int, estimator: str = "grpo", kl: float = 0.04
) -> dict[str, Any]:
    """A step of the grpo stage: GSM8K questions where they are given, else prompts of the pairs; a cheap rule."""
    rows = prompt_rows(source, source.gsm8k or pairs_file(source), prompts)
    if source.gsm8k is not None:
        rows |= {"columns": {"question": "prompt", "answer": "truth"}}
    cfg, data, spec = recipe(
        source,
        "grpo",
        "grpo",
        data=rows,
        rollout={"prompts_per_step": prompts, "samples_per_prompt": samples, "max_new_tokens": tokens},
        grpo={"epochs": 1, "minibatches": 1, "aggregation": "seq_mean_token_mean", "estimator": estimator},
        kl={"coef": kl},
        optim={"tokens_per_micro_batch": GRPO_TOKENS},
        reward={"rules": [{"function": f"{HERE / 'cheap_reward.py'}:vowel_share"}]},
    )
    sizes = {"prompts": prompts, "samples": samples, "new_tokens": tokens, "micro": 2 * source.sizes.micro, "beta": kl}
    return {**spec, **sizes, "data": first_prompts(cfg, data, prompts)}


def ppo(source: Source) -> dict[str, Any]:
    prompts, tokens, epochs, minibatches = source.sizes.ppo
    reward = encoder_reward(source)
    cfg, data, spec = recipe(
        source,
        "ppo",
        "ppo",
        data=prompt_rows(source, pairs_file(source), prompts),
        rollout={"prompts_per_step": prompts, "max_new_tokens": tokens},
        ppo={"epochs": epochs, "minibatches": minibatches},
        kl={"coef": 0.05},
        optim={"tokens_per_micro_batch": PPO_TOKENS},
        critic={"init": "policy"},
        reward={"model": str(reward)},
    )
    sizes = {"prompts": prompts, "new_tokens": tokens, "epochs": epochs, "minibatches": minibatches, "beta": 0.05}
    return {**spec, **sizes, "reward": str(reward), "data": first_prompts(cfg, data, prompts)}


def generation(source: Source) -> dict[str, Any]:
    """Each prompt with a response length of its own, the same on both sides."""
    count, (low, high) = source.sizes.prompts, source.sizes.lengths
    cfg, data, spec = recipe(
        source,
        "generation",
        "grpo",
        data=prompt_rows(source, pairs_file(source), count),
        rollout={"prompts_per_step": count, "samples_per_prompt": 1, "max_new_tokens": high},
        grpo={"estimator": "reinforce_plus_plus"},
        kl={"coef": 0.0},
        reward={"rules": [{"function": f"{HERE / 'cheap_reward.py'}:vowel_share"}]},
    )
    generator = torch.Generator().manual_seed(source.seed)
    lengths = [low, high, *torch.randint(low, high + 1, (count - 2,), generator=generator).tolist()]
    return {**spec, "prompts": count, "lengths": lengths, "data": first_prompts(cfg, data, count)}


def first_prompts(cfg: AnyConfig, data: StageData, count: int) -> list[list[int]]:
    """Token ids of the prompts of the first step."""
    index = next(iter(training_source(cfg, len(data.prepared.train))[0])).tolist()
    if len(index) < count:
        raise SystemExit(f"error: {count} prompts are asked for, {len(index)} fit\n  fix: ask for fewer")
    return [list(data.prepared.train.tokens[i]) for i in index]


SPECIFICATIONS: dict[str, Callable[[Source], dict[str, Any]]] = {
    "generation": generation,
    "grpo": grpo,
    "dpo": dpo,
    "sft": sft,
    "reward_model": reward_model,
    "ppo": ppo,
}
