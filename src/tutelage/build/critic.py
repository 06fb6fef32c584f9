"""Where a critic starts: the reward model where shapes allow, else the policy, or a folder."""

from __future__ import annotations

from tutelage.build.kit import Kit
from tutelage.build.reward import load_reward_model
from tutelage.build.reward_models import step_settings
from tutelage.config import PPOConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ConfigError, ModelError
from tutelage.math.policy_losses import COUPLED_POLICY_LOSSES
from tutelage.models.heads import ScalarModel
from tutelage.models.load import value_from


def on_own_model(cfg: PPOConfig) -> bool:
    """Whether the critic is a model and a role.

    Raises ConfigError for a critic on the actor's trunk beside a policy loss that cannot be added to its own.
    """
    kind = cfg.policy_loss.kind
    if cfg.critic.trunk == "actor" and kind in COUPLED_POLICY_LOSSES:
        raise ConfigError(
            f"critic.trunk is actor and policy_loss.kind is {kind}: that loss is one of the whole mini-batch, and is "
            "not added to the value loss token by token",
            fix="set critic.trunk to own, or policy_loss.kind to a loss per token",
        )
    return cfg.critic.trunk == "own"


def build_critic(kit: Kit) -> tuple[ModelEngine, str | None]:
    """The critic's engine and a note that says where it started; None where it was noted before.

    Raises ModelError for `reward` where it cannot.
    """
    model, note = starting_point(kit) if kit.shared is None else (kit.shared.critic, None)
    assert model is not None, "a shared base has a critic where the stage has one"
    optim = kit.cfg.optim.model_copy(update={"lr": kit.cfg.critic.lr or kit.cfg.optim.lr})
    return kit.engine("critic", model, optim), note


def starting_point(kit: Kit) -> tuple[ScalarModel, str]:
    cfg, wanted = kit.cfg, kit.cfg.critic.init
    if wanted not in ("auto", "reward", "policy"):
        return _loaded(kit, wanted), f"critic starts from {wanted}"
    reward = None if cfg.reward.model is None or wanted == "policy" else load_reward_model(kit, "critic")
    obstacle = critic_obstacle(kit, reward)
    require_start(wanted, obstacle)
    if wanted != "policy" and obstacle is None:
        assert reward is not None
        return _from(kit, reward, cfg.reward.model), "critic starts from the reward model, head included"
    why = f" ({obstacle})" if wanted == "auto" else ""
    return _from(kit, None, cfg.model.path), f"critic starts from the policy with a new head{why}"


def critic_obstacle(kit: Kit, reward: ScalarModel | None) -> str | None:
    """Why the critic cannot start from the run's reward model, or None where it can."""
    obstacle = "there is no reward model" if reward is None else reward.critic_obstacle(kit.template.tokenizer)
    if obstacle is None and reward_mixed(kit):
        return "the reward is not the reward model's score alone, so its head would start on another scale"
    return obstacle


def require_start(wanted: str, obstacle: str | None) -> None:
    if wanted == "reward" and obstacle is not None:
        raise ModelError(
            f"critic.init is reward, but the critic cannot start there: {obstacle}",
            fix="set critic.init=policy or auto",
        )


def reward_mixed(kit: Kit) -> bool:
    """Whether the reward is anything else than the one reward model's score of a whole answer."""
    reward = kit.cfg.reward
    others = reward.rules or reward.ensemble or reward.weight != 1 or kit.cfg.environment.functions
    return bool(others) or step_settings("reward.model", reward.model, reward.steps) is not None


def _from(kit: Kit, reward: ScalarModel | None, path: str) -> ScalarModel:
    """A copy of what this process holds already; of weights that are spread over ranks or quantised, the same folder
    once more."""
    if kit.sharding("critic") is not None or kit.cfg.model.quantize != "none":
        return _loaded(kit, path)
    if reward is not None:
        return value_from(reward, kit.cfg.model, seed=kit.cfg.seed)
    held = "actor" in kit.names and kit.sharding("actor") is None
    return value_from(kit.policy if held else kit.frozen_policy("critic"), kit.cfg.model, seed=kit.cfg.seed)


def _loaded(kit: Kit, path: str) -> ScalarModel:
    settings = kit.cfg.model.model_copy(update={"path": path})
    return kit.scalar_model("critic", settings, "value", pooling="last", tokenizer=kit.template.tokenizer)
