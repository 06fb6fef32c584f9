"""Schema of the `raft` stage: the best of several samples become demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tutelage.config.generating import GeneratingConfig
from tutelage.config.rollouts import RolloutConfig
from tutelage.config.schema import OnlyIf, Schema, setting
from tutelage.config.where import at

TOP_K = OnlyIf("raft.keep is top_k", lambda c: c.raft.keep == "top_k")
THRESHOLD = OnlyIf("raft.keep is threshold", lambda c: c.raft.keep == "threshold")


class RAFTRolloutConfig(RolloutConfig):
    prompts_per_step: int = setting(32, "Prompts of one step.", ge=1)
    samples_per_prompt: int = setting(8, "Responses per prompt, of which the best are kept.", ge=1)


class RAFTSettings(Schema):
    keep: Literal["best", "top_k", "threshold"] = setting(
        "best",
        "best: one response to each prompt; top_k: the best raft.top_k; threshold: all of at least raft.threshold.",
    )
    top_k: int = setting(2, "Responses kept to each prompt, fewer than there are.", ge=1, only_if=TOP_K)
    threshold: float = setting(0.0, "Lowest score that is kept, in units of the reward.", only_if=THRESHOLD)
    epochs: int = setting(1, "Passes over the kept responses of each step.", ge=1)
    minibatches: int = setting(1, "Optimiser updates per pass.", ge=1)
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_horizon"] = setting(
        "token_mean", "Denominator of the loss; constant_horizon divides by rollout.max_new_tokens."
    )
    missing_eos_penalty: float = setting(0.0, "Subtracted from the score of a truncated response.", ge=0)


class RAFTKLConfig(Schema):
    coef: float = setting(
        0.0,
        "Subtracted from a score for each nat of log(policy / reference) of its response, before the best are chosen; "
        "0: no reference is built.",
        ge=0,
    )


class RAFTAlarmConfig(Schema):
    kl: float = setting(
        10.0,
        "Warn when the sequence KL passes this many nats.",
        gt=0,
        only_if=OnlyIf("kl.coef is above 0", lambda c: c.kl.coef > 0),
    )
    length_ratio: float = setting(2.0, "Warn when mean length passes this multiple of its start.", gt=1)


class RAFTConfig(GeneratingConfig):
    algorithm: Literal["raft"] = setting("raft", "Rejection sampling: supervised fine-tuning on the best of n samples.")
    rollout: RAFTRolloutConfig = setting(RAFTRolloutConfig, "Generation.")
    raft: RAFTSettings = setting(RAFTSettings, "The algorithm.")
    kl: RAFTKLConfig = setting(RAFTKLConfig, "Distance from the reference.")
    alarms: RAFTAlarmConfig = setting(RAFTAlarmConfig, "When to warn.")


def raft_problems(config: object, where: Mapping[str, object]) -> list[str]:
    """Rules across keys of the stage: one sentence for each that is broken; none for another stage."""
    if not isinstance(config, RAFTConfig):
        return []
    found, samples, own = [], config.rollout.samples_per_prompt, config.raft
    said = f"rollout.samples_per_prompt is {samples}{at('rollout.samples_per_prompt', where)}"
    if own.keep == "best" and samples < 2:
        found.append(f"{said}: the best of one response is every response, good or bad; use at least 2, better 8")
    if own.keep == "top_k" and samples <= own.top_k:
        found.append(
            f"{said} and raft.top_k is {own.top_k}{at('raft.top_k', where)}: every response would be kept; take more "
            "samples, or lower raft.top_k"
        )
    kept = config.rollout.prompts_per_step * {"best": 1, "top_k": own.top_k, "threshold": samples}[own.keep]
    if kept < own.minibatches:
        found.append(
            f"a step keeps at most {kept} responses (rollout.prompts_per_step {config.rollout.prompts_per_step}"
            f"{at('rollout.prompts_per_step', where)}), fewer than raft.minibatches {own.minibatches}"
            f"{at('raft.minibatches', where)}: a mini-batch would be empty"
        )
    return found
