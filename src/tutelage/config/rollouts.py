"""Sections of every algorithm that learns from its own rollouts: generation, KL, alarms."""

from __future__ import annotations

from typing import Literal

from tutelage.config.policy_loss import PPO_CLIP
from tutelage.config.schema import OnlyIf, Schema, setting
from tutelage.config.vllm import VLLMConfig

ADAPTIVE = OnlyIf("kl.controller is adaptive", lambda c: c.kl.controller == "adaptive")
INPROCESS = OnlyIf("rollout.engine is inprocess", lambda c: c.rollout.engine == "inprocess")
VLLM = OnlyIf("rollout.engine is vllm", lambda c: c.rollout.engine == "vllm")
HAS_BUDGET = OnlyIf("kl.budget is given", lambda c: c.kl.budget is not None)


class RolloutConfig(Schema):
    prompts_per_step: int = setting(64, "Prompts of one step.", ge=1)
    samples_per_prompt: int = setting(1, "Responses per prompt.", ge=1)
    max_new_tokens: int = setting(128, "Length limit of a response; reaching it means truncated.", ge=1)
    temperature: float = setting(1.0, "Divides the logits when sampling and in every logprob.", gt=0, le=10)
    stop: list[str] = setting(list, "Stop strings besides the EOS tokens; the text that stops is kept.")
    engine: Literal["inprocess", "vllm"] = setting(
        "inprocess", "inprocess: the training weights themselves generate; vllm: an engine of its own (make vllm)."
    )
    tokens_in_flight: int = setting(
        65536, "Bound on cached tokens while generating; more prompts wait.", ge=64, only_if=INPROCESS
    )
    vllm: VLLMConfig = setting(VLLMConfig, "How vLLM is started and gets new weights.", only_if=VLLM)


class PolicySettings(Schema):
    """What the clipped policy loss of `algorithms.policy` reads; each algorithm's section has these keys."""

    epochs: int = setting(4, "Passes over each rollout batch.", ge=1)
    minibatches: int = setting(4, "Optimiser updates per pass.", ge=1)
    clip_low: float = setting(0.2, "Ratios below 1 - clip_low are clipped.", gt=0, lt=1, only_if=PPO_CLIP)
    clip_high: float = setting(0.2, "Ratios above 1 + clip_high are clipped.", gt=0, only_if=PPO_CLIP)
    dual_clip: float | None = setting(
        None, "Lower bound dual_clip * advantage where the advantage is negative.", gt=1, only_if=PPO_CLIP
    )
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus.", ge=0)
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_horizon"] = setting(
        "token_mean", "Denominator of the losses; constant_horizon divides by rollout.max_new_tokens."
    )
    missing_eos_penalty: float = setting(0.0, "Subtracted from the score of a truncated response.", ge=0)


class KLConfig(Schema):
    coef: float = setting(0.05, "KL coefficient; 0 is allowed and warns.", ge=0)
    placement: Literal["reward", "loss"] = setting("reward", "Per-token penalty in the reward, or a term of the loss.")
    estimator: Literal["k1", "k2", "k3", "k3_unbiased", "k3_importance"] = setting(
        "k1",
        "Reward: k1 (unbiased), k2 or k3. Loss: k2 and k3_unbiased have the gradient of KL(policy || reference), "
        "k3_importance too and when the tokens are those of the old policy, k3 that of KL(reference || policy); k1 is "
        "refused.",
    )
    controller: Literal["fixed", "adaptive"] = setting("fixed", "adaptive follows kl.target (Ziegler et al. 2019).")
    target: float = setting(6.0, "Sequence KL in nats (summed over tokens) to hold.", gt=0, only_if=ADAPTIVE)
    horizon: int = setting(10000, "Sequences over which the coefficient adapts.", ge=1, only_if=ADAPTIVE)
    budget: float | None = setting(None, "Sequence KL in nats that the policy may spend.", gt=0)
    on_budget: Literal["warn", "lower", "stop"] = setting(
        "warn", "Past the budget: warn, lower the learning signal by budget / KL, or stop.", only_if=HAS_BUDGET
    )


class AlarmConfig(Schema):
    kl: float = setting(10.0, "Warn when the sequence KL passes this many nats.", gt=0)
    clip_fraction: float = setting(0.2, "Warn when more than this share of tokens is clipped.", gt=0, le=1)
    entropy_ratio: float = setting(0.1, "Warn when entropy falls below this share of its start.", ge=0, lt=1)
    length_ratio: float = setting(2.0, "Warn when mean length passes this multiple of its start.", gt=1)
