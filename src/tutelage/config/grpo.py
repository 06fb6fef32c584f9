"""Schema of the `grpo` stage: groups of responses instead of a critic."""

from __future__ import annotations

from typing import Literal

from tutelage.config.generating import PolicyGradientConfig
from tutelage.config.rollouts import KLConfig, PolicySettings, RolloutConfig
from tutelage.config.schema import OnlyIf, setting

KL_ON = OnlyIf("kl.coef is above 0", lambda c: c.kl.coef > 0)


class GRPORolloutConfig(RolloutConfig):
    prompts_per_step: int = setting(16, "Prompts of one step.", ge=1)
    samples_per_prompt: int = setting(8, "Responses per prompt: the group; at least 2.", ge=1)


class GRPOSettings(PolicySettings):
    epochs: int = setting(1, "Passes over each rollout batch.", ge=1)
    minibatches: int = setting(1, "Optimiser updates per pass.", ge=1)
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_horizon"] = setting(
        "seq_mean_token_mean", "Denominator of the loss; constant_horizon divides by rollout.max_new_tokens."
    )
    scale_rewards: Literal["group", "batch"] = setting(
        "group", "Divide by the standard deviation of the scores of the group, or of the whole batch."
    )
    std_eps: float = setting(1e-4, "Added to that standard deviation.", gt=0)


class GRPOKLConfig(KLConfig):
    coef: float = setting(0.04, "KL coefficient; 0: no reference is built, and no KL is reported.", ge=0)
    placement: Literal["reward", "loss"] = setting(
        "loss", "Per-token penalty in the reward, or a term of the loss.", only_if=KL_ON
    )
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = setting(
        "k3",
        "Reward: k1 (unbiased), k2 or k3. Loss: k2 and k3_unbiased have the gradient of KL(policy || reference), "
        "k3 that of KL(reference || policy); k1 is refused.",
        only_if=KL_ON,
    )


class GRPOConfig(PolicyGradientConfig):
    algorithm: Literal["grpo"] = setting("grpo", "Group relative policy optimisation with actor, reference and reward.")
    rollout: GRPORolloutConfig = setting(GRPORolloutConfig, "Generation.")
    grpo: GRPOSettings = setting(GRPOSettings, "The algorithm.")
    kl: GRPOKLConfig = setting(GRPOKLConfig, "Distance from the reference.")
