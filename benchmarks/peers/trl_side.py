"""TRL's own loss code on given inputs.  Runs in an environment of `install_peers.py`, and imports nothing of Tutelage.

    .peers/trl-1.16.0/bin/python benchmarks/peers/trl_side.py INPUTS.json     prints {name: [loss, gradient norm]}

A trainer is made without its constructor and given the attributes its loss reads; the model is a stub whose forward
returns the log-probabilities of the inputs.  So what runs between the inputs and the loss is TRL's, unchanged.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor


class Alone:
    """An accelerator of one process."""

    device, num_processes, sync_gradients = torch.device("cpu"), 1, True

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Any, reduction: str = "sum") -> Any:
        return x


def metrics() -> dict[str, Any]:
    return defaultdict(lambda: defaultdict(list))


def made(cls: type, **attributes: Any) -> Any:
    trainer = object.__new__(cls)
    common = {
        "model": SimpleNamespace(training=True),
        "accelerator": Alone(),
        "_metrics": metrics(),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "current_gradient_accumulation_steps": 1,
    }
    for name, value in {**common, **attributes}.items():
        object.__setattr__(trainer, name, value)
    return trainer


def forward_of(logp: Tensor, collision: Tensor) -> Any:
    """A model that has these log-probabilities, whatever it is asked."""
    blank = torch.zeros_like(logp)
    found = SimpleNamespace(
        log_probs=logp, entropy=blank, mean_logits=blank, is_top1=blank.bool(), log_sum_sq_probs=collision, logits=None
    )
    return lambda **inputs: found


def with_gradient(loss: Tensor, leaf: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return [float(loss), float(gradient.norm())]


def row_sums(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(1)


# ---- preferences: rows are all chosen, then all rejected ----


def dpo(case: dict[str, Any]) -> dict[str, list[float]]:
    from trl import DPOTrainer

    logp, ref = torch.tensor(case["logp"]), torch.tensor(case["ref_logp"])
    mask, collision = torch.tensor(case["mask"]), torch.tensor(case["log_collision"])
    half = len(logp) // 2
    whole = torch.cat([torch.zeros(len(mask), 1), mask], 1)
    found = {}
    for name, settings in case["dpo"].items():
        args = SimpleNamespace(discopop_tau=settings.get("discopop_tau", 0.05), gradient_checkpointing_kwargs=None)
        kinds = settings["loss"]
        ld = settings.get("ld_alpha")
        ref_row = ld_sums(ref, mask, ld)
        trainer = made(
            DPOTrainer,
            args=args,
            ld_alpha=ld,
            beta=settings.get("beta", 0.1),
            label_smoothing=settings.get("label_smoothing", 0.0),
            f_divergence_type=settings.get("divergence", "reverse_kl"),
            f_alpha_divergence_coef=settings.get("alpha", 0.5),
            loss_types=kinds,
            loss_weights=settings.get("weights", [1.0] * len(kinds)),
            use_weighting=settings.get("wpo", False),
        )
        leaf = logp.clone().requires_grad_(True)
        inputs = {
            "input_ids": torch.zeros_like(whole, dtype=torch.int64),
            "attention_mask": torch.ones_like(whole),
            "completion_mask": whole.long(),
            "ref_chosen_logps": ref_row[:half],
            "ref_rejected_logps": ref_row[half:],
        }
        loss = trainer._compute_loss(forward_of(leaf * mask, collision), inputs, False)
        found[name] = with_gradient(loss, leaf)
    return found


def ld_sums(x: Tensor, mask: Tensor, alpha: float | None) -> Tensor:
    """Reference sums as TRL's precomputing makes them: without LD-DPO plain sums, with it the caller's own."""
    if alpha is None:
        return row_sums(x, mask)
    lens = mask.sum(1)
    shared = torch.minimum(*lens.chunk(2)).repeat(2)
    position = mask.cumsum(1)
    near = mask * (position <= shared[:, None])
    return row_sums(x, near) + alpha * row_sums(x, mask - near)


def reference_free(case: dict[str, Any]) -> dict[str, list[float]]:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    logp, mask = torch.tensor(case["logp"]), torch.tensor(case["mask"])
    half, found = len(logp) // 2, {}
    for name, settings in case["reference_free"].items():
        leaf = logp.clone().requires_grad_(True)
        sums, lens = row_sums(leaf, mask), mask.sum(1)
        rows = sums / lens if settings["mean"] else sums
        nll = -sums[:half].sum() / lens[:half].sum()
        if settings["trainer"] == "orpo":
            trainer = made(ORPOTrainer, beta=settings["beta"])
            losses = trainer.odds_ratio_loss(rows[:half], rows[half:])[0]
            loss = nll - losses.mean()
        else:
            trainer = made(
                CPOTrainer,
                beta=settings["beta"],
                alpha=settings.get("alpha", 0.0),
                simpo_gamma=settings.get("gamma", 0.5),
                loss_type=settings["loss"],
                label_smoothing=0.0,
            )
            loss = trainer.cpo_loss(rows[:half], rows[half:])[0].mean() + settings.get("cpo_alpha", 0.0) * nll
        found[name] = with_gradient(loss, leaf)
    return found


def kto(case: dict[str, Any]) -> dict[str, list[float]]:
    from trl import KTOTrainer

    logp, ref = torch.tensor(case["logp"]), torch.tensor(case["ref_logp"])
    mask, half, found = torch.tensor(case["mask"]), len(case["logp"]) // 2, {}
    answers, mismatched = slice(0, half), slice(half, None)
    for name, settings in case["kto"].items():
        leaf = logp.clone().requires_grad_(True)
        trainer = made(
            KTOTrainer,
            loss_type=settings["loss"],
            beta=settings["beta"],
            desirable_weight=settings.get("desirable_weight", 1.0),
            undesirable_weight=settings.get("undesirable_weight", 1.0),
            calculate_KL=settings["loss"] == "kto",
        )
        object.__setattr__(trainer, "_compute_kl_logps", lambda model, batch: row_sums(logp, mask)[mismatched])
        whole = torch.cat([torch.zeros(half, 1), mask[answers]], 1)
        inputs = {
            "input_ids": torch.zeros_like(whole, dtype=torch.int64),
            "attention_mask": torch.ones_like(whole),
            "completion_mask": whole.long(),
            "label": torch.tensor(case["desirable"]),
            "ref_logps": row_sums(ref, mask)[answers],
            "ref_KL_logps": row_sums(ref, mask)[mismatched],
        }
        blank = torch.zeros_like(logp[answers])
        loss = trainer._compute_loss(forward_of((leaf * mask)[answers], blank), inputs, False)
        found[name] = with_gradient(loss, leaf)
    return found


# ---- policy losses: rows are responses ----


def policy(case: dict[str, Any]) -> dict[str, list[float]]:
    from trl import GRPOTrainer

    return {
        name: policy_loss(GRPOTrainer, case, settings)
        for name, settings in case["policy"].items()
        if settings.get("trainer", "grpo") == "grpo"
    }


def policy_experimental(case: dict[str, Any]) -> dict[str, list[float]]:
    from trl.experimental.gmpo import GMPOTrainer

    return {n: policy_loss(GMPOTrainer, case, s) for n, s in case["policy"].items() if s.get("trainer") == "gmpo"}


def policy_loss(cls: type, case: dict[str, Any], settings: dict[str, Any]) -> list[float]:
    logp, mask = torch.tensor(case["logp"]), torch.tensor(case["mask"])
    leaf = logp.clone().requires_grad_(True)
    args = SimpleNamespace(
        delta=settings.get("delta"),
        sapo_temperature_pos=settings.get("temperature_positive", 1.0),
        sapo_temperature_neg=settings.get("temperature_negative", 1.05),
        use_bias_correction_kl=settings.get("bias_corrected_kl", False),
        steps_per_generation=1,
        per_device_train_batch_size=len(logp),
    )
    trainer = made(
        cls,
        args=args,
        beta=settings.get("beta", 0.0),
        loss_type=settings["loss"],
        importance_sampling_level=settings.get("level", "token"),
        epsilon_low=settings.get("low", 0.2),
        epsilon_high=settings.get("high", 0.2),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=settings.get("horizon", 16),
        _entropy_bonus_enabled=False,
        clip_ratio_c=settings.get("ratio_cap", 20.0),
        divergence_type=settings.get("divergence", "binary_tv"),
    )
    blank = torch.zeros_like(logp)
    object.__setattr__(trainer, "_get_per_token_logps_and_entropies", lambda *a, **k: (leaf, blank, None))
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(case["advantage"]),
        "old_per_token_logps": torch.tensor(case["old_logp"]),
        "sampling_per_token_logps": torch.tensor(case["old_logp"]),
        "ref_per_token_logps": torch.tensor(case["ref_logp"]),
        "num_items_in_batch": mask.sum(),
    }
    return with_gradient(trainer._compute_loss(None, inputs), leaf)


# ---- reward models ----


def reward_model(case: dict[str, Any]) -> dict[str, list[float]]:
    from trl import RewardTrainer

    found = {}
    for name, settings in case["reward_model"].items():
        leaf = torch.tensor(case["scores"], requires_grad=True)
        args = SimpleNamespace(center_rewards_coefficient=settings.get("centring"))
        trainer = made(RewardTrainer, args=args)
        inputs = {"attention_mask": torch.ones(len(leaf), 1)}
        if settings.get("margin"):
            inputs["margin"] = torch.tensor(case["margin"])
        output = SimpleNamespace(logits=leaf[:, None])
        loss = trainer.compute_loss(lambda output=output, **given: output, inputs)
        found[name] = with_gradient(loss, leaf)
    return found


# ---- what only 1.8 has ----


def bco(case: dict[str, Any]) -> dict[str, list[float]]:
    from trl.experimental.bco import BCOTrainer

    logp, ref = torch.tensor(case["logp"]), torch.tensor(case["ref_logp"])
    mask, half = torch.tensor(case["mask"]), len(case["logp"]) // 2
    wanted = torch.tensor(case["desirable"]).bool()
    found = {}
    for name, settings in case["bco"].items():
        leaf = logp.clone().requires_grad_(True)
        sums, ref_sums = row_sums(leaf, mask)[:half], row_sums(ref, mask)[:half]
        rewards = settings["beta"] * (sums - ref_sums).detach()
        running = SimpleNamespace(mean=float(rewards.mean()), update=lambda x: None)
        trainer = made(
            BCOTrainer, beta=settings["beta"], running=running, embedding_func=None, embedding_tokenizer=None
        )
        losses = trainer.bco_loss(sums[wanted], sums[~wanted], ref_sums[wanted], ref_sums[~wanted], None, None, True)[0]
        found[name] = with_gradient(losses.mean(), leaf)
    return found


def xpo(case: dict[str, Any]) -> dict[str, list[float]]:
    """The first half of the rows is answered by the policy, the second by the reference, to the same prompts."""
    from trl.experimental.xpo import XPOTrainer

    logp, ref, mask = (torch.tensor(case[name]) for name in ("logp", "ref_logp", "mask"))
    half, found = len(logp) // 2, {}
    for name, settings in case["xpo"].items():
        leaf = logp.clone().requires_grad_(True)
        args = SimpleNamespace(loss_type=settings["loss"])
        trainer = made(XPOTrainer, args=args, _alpha=settings["alpha"], state=Epoch(), _beta=settings["beta"])
        own, theirs = (leaf * mask)[:half], (leaf * mask)[half:]
        loss = trainer._compute_losses(
            own, theirs, (ref * mask)[half:], (ref * mask)[:half], torch.tensor(case["policy_wins"]).bool()
        )[0]
        found[name] = with_gradient(loss, leaf)
    return found


def nash_md(case: dict[str, Any]) -> dict[str, list[float]]:
    from trl.experimental.nash_md import NashMDTrainer

    logp, ref, mask = (torch.tensor(case[name]) for name in ("logp", "ref_logp", "mask"))
    half, found = len(logp) // 2, {}
    for name, settings in case["nash_md"].items():
        leaf = logp.clone().requires_grad_(True)
        trainer = made(NashMDTrainer, _beta=settings["beta"], state=Epoch())
        probability = torch.tensor(case["probability"])
        loss = trainer._compute_losses((leaf * mask)[:half], (ref * mask)[:half], probability)[0]
        found[name] = with_gradient(loss, leaf)
    return found


def dppo(case: dict[str, Any]) -> dict[str, list[float]]:
    from trl.experimental.dppo import DPPOTrainer

    return {n: policy_loss(DPPOTrainer, case, s) for n, s in case["policy"].items() if s.get("trainer") == "dppo"}


class Epoch:
    epoch = 0


SIDES = {
    "1.16": (dpo, reference_free, kto, policy, policy_experimental, reward_model),
    "1.8": (bco, xpo, nash_md, dppo),
}


def main(path: str) -> None:
    with open(path, encoding="utf8") as file:
        case = json.load(file)
    torch.set_default_dtype(torch.float32)
    version = next(name for name in SIDES if trl.__version__.startswith(f"{name}."))
    found: dict[str, list[float]] = {}
    for side in SIDES[version]:
        found.update(side(case))
    print(json.dumps({"version": trl.__version__, "values": found}))


if __name__ == "__main__":
    main(sys.argv[1])
