"""Schema of the `ppo` stage: four roles, rollouts, the KL terms, evaluation and alarms."""

from __future__ import annotations

from typing import Literal

from tutelage.config.common import OptimConfig
from tutelage.config.generating import PolicyGradientConfig
from tutelage.config.rollouts import AlarmConfig, PolicySettings
from tutelage.config.schema import OnlyIf, Schema, setting

OWN_TRUNK = OnlyIf("critic.trunk is own", lambda c: c.critic.trunk == "own")
ACTORS_TRUNK = OnlyIf("critic.trunk is actor", lambda c: c.critic.trunk == "actor")


class PPOSettings(PolicySettings):
    clip_value: float | None = setting(0.2, "Values move at most this far from the old ones; null: not clipped.", gt=0)
    vf_coef: float = setting(
        0.5,
        "Weight of the value loss. With critic.trunk own, policy and critic have an optimiser each, so Adam and "
        "gradient clipping leave it little effect; to train that critic faster or slower set critic.lr. With "
        "critic.trunk actor, it is the value loss's share of the one gradient.",
        ge=0,
    )
    gamma: float = setting(1.0, "Discount per token.", gt=0, le=1)
    lam: float = setting(0.95, "GAE lambda.", ge=0, le=1)
    whiten_advantages: bool = setting(True, "Mean 0 and variance 1 over the tokens of the global batch.")
    whiten_rewards: bool = setting(False, "Variance 1 over the tokens of the global batch, mean kept.")
    bootstrap_truncated: bool = setting(False, "A truncated response continues with the value after its last token.")


class CriticConfig(Schema):
    trunk: Literal["own", "actor"] = setting(
        "own", "own: a model of its own. actor: a value head on the actor's last hidden states, trained with the actor."
    )
    detach_trunk: bool = setting(False, "The value loss trains the head alone, not the trunk.", only_if=ACTORS_TRUNK)
    init: str = setting(
        "auto",
        "auto (the reward model where shapes allow, else the policy), reward, policy, or a path.",
        only_if=OWN_TRUNK,
    )
    lr: float | None = setting(None, "Learning rate of the critic; default: optim.lr.", gt=0, only_if=OWN_TRUNK)


class PPOAlarmConfig(AlarmConfig):
    value_loss_ratio: float = setting(10.0, "Warn when the value loss passes this multiple of its median.", gt=1)


class PPOConfig(PolicyGradientConfig):
    algorithm: Literal["ppo"] = setting("ppo", "Proximal policy optimisation with actor, critic, reference and reward.")
    ppo: PPOSettings = setting(PPOSettings, "The algorithm.")
    critic: CriticConfig = setting(CriticConfig, "The critic.")
    optim: OptimConfig = setting(OptimConfig, "Optimiser of actor and critic.")
    alarms: PPOAlarmConfig = setting(PPOAlarmConfig, "When to warn.")
