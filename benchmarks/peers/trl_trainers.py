"""TRL's trainers, one pass or one step for each message.  Runs in an environment of `install_peers.py`.

    .peers/trl-1.16.0/bin/python benchmarks/peers/trl_trainers.py SPECIFICATION.json

Settings are what someone who knows TRL would choose on this device: no gradient checkpointing (memory allows it), the
batch cut so that padding and logits stay small, reference logprobs precomputed, nothing saved or reported.  Rows come
tokenised, so both sides run the same tokens in the same order.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from wire import Job, serve


def import_all(spec: dict[str, Any]) -> None:
    import datasets
    import torch
    import trl

    torch.set_num_threads(spec["threads"])
    datasets.disable_progress_bars()
    names = {"sft": "SFTTrainer", "reward_model": "RewardTrainer", "dpo": "DPOTrainer", "grpo": "GRPOTrainer"}
    if spec["work"] in names:
        getattr(trl, names[spec["work"]])
    else:
        from trl.experimental.ppo import PPOTrainer  # noqa: F401


def load(spec: dict[str, Any]) -> Job:
    return {"sft": sft, "reward_model": reward_model, "dpo": dpo, "grpo": grpo, "ppo": ppo}[spec["work"]](spec)


# ---- what all have


def tokenizer_of(path: str, pad_id: int | None = None) -> Any:
    """pad_id: a token that is not the EOS, since these trainers tell padding by its id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if pad_id is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
    return tokenizer


def causal(spec: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa"
    )


def common(spec: dict[str, Any], batch: int, micro: int) -> dict[str, Any]:
    import torch

    optimiser = spec["optimiser"]
    return {
        "output_dir": str(Path(spec["scratch"]) / f"trl-{spec['work']}"),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": batch // micro,
        "num_train_epochs": 1,
        "learning_rate": optimiser["lr"],
        "lr_scheduler_type": "constant",
        "adam_epsilon": optimiser["eps"],
        "max_grad_norm": optimiser["max_grad_norm"],
        "weight_decay": optimiser["weight_decay"],
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "seed": spec["seed"],
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def said(spec: dict[str, Any], args: Any, *names: str) -> dict[str, Any]:
    shown = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "gradient_checkpointing", *names)
    return {"dtype": spec["dtype"], "attention": "sdpa", **{name: str(getattr(args, name)) for name in shown}}


def device_peak() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def trained(trainer: Any) -> dict[str, Any]:
    """One call of `train`; optimiser and weights go on from the last one."""
    trainer.train()
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


def rows_of(spec: dict[str, Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(spec["data"])


# ---- the trainers


def sft(spec: dict[str, Any]) -> Job:
    from trl import SFTConfig, SFTTrainer

    layout = spec.get("layout", "padded")
    args = SFTConfig(
        **common(spec, spec["batch"], spec["micro"]),
        max_length=None,
        padding_free=layout == "padding_free",
        shuffle_dataset=False,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    tokenizer = tokenizer_of(spec["model"], spec["pad_id"])
    trainer = SFTTrainer(model=causal(spec), args=args, train_dataset=rows_of(spec), processing_class=tokenizer)
    why = "one row of all, by position ids" if args.padding_free else "padded rows (packing is for flash attention)"
    return Job(lambda: trained(trainer), {**said(spec, args, "padding_free"), "layout": why}, device_peak)


def reward_model(spec: dict[str, Any]) -> Job:
    import torch
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    args = RewardConfig(
        **common(spec, spec["batch"], spec["micro"]),
        max_length=None,
        train_sampling_strategy="sequential",
        disable_dropout=True,
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        spec["model"], num_labels=1, dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa"
    )
    tokenizer = tokenizer_of(spec["model"], spec["pad_id"])
    trainer = RewardTrainer(model=model, args=args, train_dataset=rows_of(spec), processing_class=tokenizer)
    return Job(lambda: trained(trainer), said(spec, args), device_peak)


def dpo(spec: dict[str, Any]) -> Job:
    from trl import DPOConfig, DPOTrainer

    class Tokenised(DPOTrainer):  # type: ignore[misc]
        """Takes rows that are tokenised already, which this trainer alone of TRL's does not."""

        def _prepare_dataset(self, dataset: Any, *given: Any, **rest: Any) -> Any:
            return dataset

    args = DPOConfig(
        **common(spec, spec["batch"], spec["micro"]),
        max_length=None,
        beta=spec["beta"],
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=2 * spec["micro"],
        train_sampling_strategy="sequential",
    )
    start = time.perf_counter()
    tokenizer = tokenizer_of(spec["model"], spec["pad_id"])
    rows = rows_of(spec)
    text = {name: ["-"] * len(rows) for name in ("prompt", "chosen", "rejected")}
    for name, column in text.items():  # looked at to tell chats from texts, and never read
        rows = rows.add_column(name, column)
    trainer = Tokenised(model=causal(spec), args=args, train_dataset=rows, processing_class=tokenizer)
    once = {"trainer built, reference logprobs of the rows of a pass": time.perf_counter() - start}
    shown = said(spec, args, "precompute_ref_log_probs", "precompute_ref_batch_size", "beta")
    return Job(lambda: trained(trainer), shown, device_peak, once)


def grpo(spec: dict[str, Any]) -> Job:
    from cheap_reward import of_completions
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    responses = spec["prompts"] * spec["samples"]
    args = GRPOConfig(
        **common(spec, responses, min(spec["micro"], responses)),
        max_steps=1,
        num_generations=spec["samples"],
        max_completion_length=spec["new_tokens"],
        generation_kwargs={"min_new_tokens": spec["new_tokens"]},
        temperature=1.0,
        beta=spec["beta"],
        num_iterations=1,
        loss_type="grpo",
        scale_rewards="group",
        shuffle_dataset=False,
    )
    tokenizer = tokenizer_of(spec["model"], spec["pad_id"])
    texts = [tokenizer.decode(row) for row in spec["data"]]
    if tokenizer(text=texts)["input_ids"] != spec["data"]:
        raise ValueError("the prompts are not what their texts are tokenised to")
    trainer = GRPOTrainer(
        model=causal(spec),
        reward_funcs=of_completions,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
    )

    def run() -> dict[str, Any]:
        found = trained(trainer)
        last = trainer.state.log_history[0]
        shortest = last["completions/min_length"]
        assert shortest == spec["new_tokens"], f"a response has {shortest} tokens"
        return found

    shown = said(spec, args, "steps_per_generation", "num_iterations", "loss_type", "beta", "generation_kwargs")
    return Job(run, shown, device_peak)


def ppo(spec: dict[str, Any]) -> Job:
    """The experimental trainer: a mini-batch is one micro-batch, since it accumulates over whole batches only."""
    import torch
    from datasets import Dataset
    from reading_reward import ReadingReward
    from transformers import AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = tokenizer_of(spec["model"], spec["pad_id"])
    tokenizer.padding_side = "left"
    args = PPOConfig(
        **{**common(spec, spec["prompts"], spec["prompts"]), "logging_steps": 1},
        total_episodes=spec["prompts"],
        num_ppo_epochs=spec["epochs"],
        num_mini_batches=spec["minibatches"],
        local_rollout_forward_batch_size=spec["prompts"],
        num_sample_generations=0,
        response_length=spec["new_tokens"],
        stop_token=None,
        temperature=1.0,
        kl_coef=spec["beta"],
        vf_coef=0.5,
    )
    value = AutoModelForSequenceClassification.from_pretrained(
        spec["model"], num_labels=1, dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa"
    )
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=causal(spec),
        ref_model=causal(spec),
        reward_model=ReadingReward(spec["reward"], tokenizer, spec["pad_id"]),
        value_model=value,
        train_dataset=Dataset.from_list([{"input_ids": row} for row in spec["data"]]),
        eval_dataset=Dataset.from_list([{"input_ids": row} for row in spec["data"][:1]]),
    )

    def run() -> dict[str, Any]:
        trainer.train()
        return {}

    shown = said(
        spec, args, "num_ppo_epochs", "num_mini_batches", "local_rollout_forward_batch_size", "response_length"
    )
    return Job(run, {**shown, "reward": "the encoder on decoded text, no gradient"}, device_peak)


if __name__ == "__main__":
    serve(import_all, load, "trl", "torch", "transformers", "accelerate")
