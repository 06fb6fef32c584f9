"""Schema of the `ppo` stage: four roles, rollouts, the KL terms, evaluation and alarms."""

from __future__ import annotations

from typing import Literal

from tutelage.config.common import CheckpointConfig, ModelConfig, OptimConfig, PromptDataConfig, RunConfig
from tutelage.config.schema import OnlyIf, Schema, setting

ADAPTIVE = OnlyIf("kl.controller is adaptive", lambda c: c.kl.controller == "adaptive")
HAS_BUDGET = OnlyIf("kl.budget is given", lambda c: c.kl.budget is not None)
HAS_REWARD_MODEL = OnlyIf("reward.model is given", lambda c: c.reward.model is not None)


class RolloutConfig(Schema):
    prompts_per_step: int = setting(64, "Prompts of one step.", ge=1)
    samples_per_prompt: int = setting(1, "Responses per prompt.", ge=1)
    max_new_tokens: int = setting(128, "Length limit of a response; reaching it means truncated.", ge=1)
    temperature: float = setting(1.0, "Divides the logits when sampling and in every logprob.", gt=0, le=10)
    stop: list[str] = setting(list, "Stop strings besides the EOS tokens; the text that stops is kept.")
    tokens_in_flight: int = setting(65536, "Bound on cached tokens while generating; more prompts wait.", ge=64)


class PPOSettings(Schema):
    epochs: int = setting(4, "Passes over each rollout batch.", ge=1)
    minibatches: int = setting(4, "Optimiser updates per pass.", ge=1)
    clip_low: float = setting(0.2, "Ratios below 1 - clip_low are clipped.", gt=0, lt=1)
    clip_high: float = setting(0.2, "Ratios above 1 + clip_high are clipped.", gt=0)
    dual_clip: float | None = setting(None, "Lower bound dual_clip * advantage where the advantage is negative.", gt=1)
    clip_value: float | None = setting(0.2, "Values move at most this far from the old ones; null: not clipped.", gt=0)
    vf_coef: float = setting(
        0.5,
        "Weight of the value loss. Policy and critic have an optimiser each, so Adam and gradient clipping leave it "
        "little effect; to train the critic faster or slower set critic.lr.",
        ge=0,
    )
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus.", ge=0)
    gamma: float = setting(1.0, "Discount per token.", gt=0, le=1)
    lam: float = setting(0.95, "GAE lambda.", ge=0, le=1)
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_horizon"] = setting(
        "token_mean", "Denominator of the losses; constant_horizon divides by rollout.max_new_tokens."
    )
    whiten_advantages: bool = setting(True, "Mean 0 and variance 1 over the tokens of the global batch.")
    whiten_rewards: bool = setting(False, "Variance 1 over the tokens of the global batch, mean kept.")
    bootstrap_truncated: bool = setting(False, "A truncated response continues with the value after its last token.")
    missing_eos_penalty: float = setting(0.0, "Subtracted from the score of a truncated response.", ge=0)


class KLConfig(Schema):
    coef: float = setting(0.05, "KL coefficient; 0 is allowed and warns.", ge=0)
    placement: Literal["reward", "loss"] = setting("reward", "Per-token penalty in the reward, or a term of the loss.")
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = setting(
        "k1",
        "Reward: k1 (unbiased), k2 or k3. Loss: k2 and k3_unbiased have the gradient of KL(policy || reference), "
        "k3 that of KL(reference || policy); k1 is refused.",
    )
    controller: Literal["fixed", "adaptive"] = setting("fixed", "adaptive follows kl.target (Ziegler et al. 2019).")
    target: float = setting(6.0, "Sequence KL in nats (summed over tokens) to hold.", gt=0, only_if=ADAPTIVE)
    horizon: int = setting(10000, "Sequences over which the coefficient adapts.", ge=1, only_if=ADAPTIVE)
    budget: float | None = setting(None, "Sequence KL in nats that the policy may spend.", gt=0)
    on_budget: Literal["warn", "lower", "stop"] = setting(
        "warn", "Past the budget: warn, lower the learning signal by budget / KL, or stop.", only_if=HAS_BUDGET
    )


class CriticConfig(Schema):
    init: str = setting(
        "auto", "auto (the reward model where shapes allow, else the policy), reward, policy, or a path."
    )
    lr: float | None = setting(None, "Learning rate of the critic; default: optim.lr.", gt=0)


class RuleConfig(Schema):
    function: str = setting(..., "module:function or file.py:function, called with (prompts, responses, truths).")
    weight: float = setting(1.0, "Weight in the total reward.")


class RewardConfig(Schema):
    model: str | None = setting(None, "Reward model folder or hub name.")
    weight: float = setting(1.0, "Weight of the reward model.", only_if=HAS_REWARD_MODEL)
    rules: list[RuleConfig] = setting(list, "Rule functions, each with a weight.")


class PPOEvaluation(Schema):
    every: int = setting(0, "Evaluate every N steps; 0: at the start and the end.", ge=0)
    prompts: int = setting(64, "Held-out prompts answered, the same before and after.", ge=1)
    gold: str | None = setting(
        None, "module:function that scores held-out answers; never used for training; picks the best checkpoint."
    )


class AlarmConfig(Schema):
    kl: float = setting(10.0, "Warn when the sequence KL passes this many nats.", gt=0)
    clip_fraction: float = setting(0.2, "Warn when more than this share of tokens is clipped.", gt=0, le=1)
    entropy_ratio: float = setting(0.1, "Warn when entropy falls below this share of its start.", ge=0, lt=1)
    length_ratio: float = setting(2.0, "Warn when mean length passes this multiple of its start.", gt=1)
    value_loss_ratio: float = setting(10.0, "Warn when the value loss passes this multiple of its median.", gt=1)


class PPOConfig(RunConfig):
    algorithm: Literal["ppo"] = setting("ppo", "Proximal policy optimisation with actor, critic, reference and reward.")
    model: ModelConfig = setting(..., "The policy; its snapshot at the start is the reference.")
    data: PromptDataConfig = setting(..., "Prompts.")
    rollout: RolloutConfig = setting(RolloutConfig, "Generation.")
    ppo: PPOSettings = setting(PPOSettings, "The algorithm.")
    kl: KLConfig = setting(KLConfig, "Distance from the reference.")
    critic: CriticConfig = setting(CriticConfig, "The critic.")
    reward: RewardConfig = setting(RewardConfig, "What is rewarded.")
    optim: OptimConfig = setting(OptimConfig, "Optimiser of actor and critic.")
    evaluation: PPOEvaluation = setting(PPOEvaluation, "Held-out prompts.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
    alarms: AlarmConfig = setting(AlarmConfig, "When to warn.")
    epochs: int = setting(1, "Passes over the prompts (ppo.epochs: passes over each rollout batch).", ge=1)
