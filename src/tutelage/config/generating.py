"""What every stage that learns from its own rollouts has in its recipe."""

from __future__ import annotations

from tutelage.config.common import CheckpointConfig, ModelConfig, OptimConfig, PromptDataConfig, RunConfig
from tutelage.config.environments import EnvironmentConfig
from tutelage.config.policy_loss import PolicyLossConfig
from tutelage.config.rewards import AnswersEvaluation, RewardConfig
from tutelage.config.rollouts import AlarmConfig, KLConfig, RolloutConfig
from tutelage.config.schedule import OffPolicyConfig, ScheduleConfig
from tutelage.config.schema import setting


class GeneratingConfig(RunConfig):
    """Prompts, generation, rewards, held-out answers.  A stage narrows a section by declaring it again."""

    model: ModelConfig = setting(..., "The policy; its snapshot at the start is the reference.")
    data: PromptDataConfig = setting(..., "Prompts.")
    rollout: RolloutConfig = setting(RolloutConfig, "Generation.")
    schedule: ScheduleConfig = setting(ScheduleConfig, "When to generate and when to learn.")
    environment: EnvironmentConfig = setting(EnvironmentConfig, "Answers of several turns, with tools or in a game.")
    reward: RewardConfig = setting(RewardConfig, "What is rewarded.")
    optim: OptimConfig = setting(OptimConfig, "Optimiser.")
    evaluation: AnswersEvaluation = setting(AnswersEvaluation, "Held-out prompts.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
    epochs: int = setting(1, "Passes over the prompts (an algorithm's own epochs: over each rollout batch).", ge=1)


class PolicyGradientConfig(GeneratingConfig):
    """Stages whose loss is a policy gradient: the clipped surrogate and its relatives, with a KL term."""

    policy_loss: PolicyLossConfig = setting(PolicyLossConfig, "The loss that updates the policy.")
    off_policy: OffPolicyConfig = setting(OffPolicyConfig, "Old logprobs, and what corrects for the sampler.")
    kl: KLConfig = setting(KLConfig, "Distance from the reference.")
    alarms: AlarmConfig = setting(AlarmConfig, "When to warn.")
