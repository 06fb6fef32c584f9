"""Where a critic starts: the reward model where shapes allow, else the policy, or a folder."""

from __future__ import annotations

from tutelage.build.kit import Kit
from tutelage.build.reward import load_reward_model
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ModelError
from tutelage.models.heads import ScalarModel
from tutelage.models.load import load_scalar_model, value_from


def build_critic(kit: Kit) -> tuple[ModelEngine, str]:
    """The critic's engine and a note that says where it started.  Raises ModelError for `reward` where it cannot."""
    model, note = starting_point(kit)
    optim = kit.cfg.optim.model_copy(update={"lr": kit.cfg.critic.lr or kit.cfg.optim.lr})
    return kit.engine("critic", model, optim), note


def starting_point(kit: Kit) -> tuple[ScalarModel, str]:
    cfg, wanted = kit.cfg, kit.cfg.critic.init
    tokenizer = kit.template.tokenizer
    if wanted not in ("auto", "reward", "policy"):
        settings = cfg.model.model_copy(update={"path": wanted})
        model = load_scalar_model(settings, "value", "last", tokenizer, seed=cfg.seed, device=kit.device)
        return model, f"critic starts from {wanted}"
    reward = None if cfg.reward.model is None or wanted == "policy" else load_reward_model(kit)
    obstacle = "there is no reward model" if reward is None else reward.critic_obstacle(tokenizer)
    if obstacle is None and (cfg.reward.rules or cfg.reward.weight != 1):
        obstacle = "the reward is not the reward model's score alone, so its head would start on another scale"
    if wanted == "reward" and obstacle is not None:
        raise ModelError(
            f"critic.init is reward, but the critic cannot start there: {obstacle}",
            fix="set critic.init=policy or auto",
        )
    if wanted != "policy" and obstacle is None:
        assert reward is not None
        return value_from(reward, cfg.model, seed=cfg.seed), "critic starts from the reward model, head included"
    why = f" ({obstacle})" if wanted == "auto" else ""
    policy = kit.policy if "actor" in kit.names else kit.frozen_policy()
    return value_from(policy, cfg.model, seed=cfg.seed), f"critic starts from the policy with a new head{why}"
