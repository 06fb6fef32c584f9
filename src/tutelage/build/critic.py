"""Where a critic starts: the reward model where shapes allow, else the policy, or a folder."""

from __future__ import annotations

from tutelage.build.device import device
from tutelage.config import PPOConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ModelError
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel
from tutelage.models.load import load_scalar_model, value_from


def build_critic(
    cfg: PPOConfig, policy: LanguageModel, reward: ScalarModel | None, updates: int
) -> tuple[ModelEngine, str]:
    """The critic's engine and a note that says where it started.  Raises ModelError for `reward` where it cannot."""
    model, note = starting_point(cfg, policy, reward)
    optim = cfg.optim.model_copy(update={"lr": cfg.critic.lr or cfg.optim.lr})
    return ModelEngine(model, optim, total_updates=updates), note


def starting_point(cfg: PPOConfig, policy: LanguageModel, reward: ScalarModel | None) -> tuple[ScalarModel, str]:
    wanted = cfg.critic.init
    if wanted not in ("auto", "reward", "policy"):
        settings = cfg.model.model_copy(update={"path": wanted})
        model = load_scalar_model(settings, "value", "last", policy.tokenizer, seed=cfg.seed, device=device())
        return model, f"critic starts from {wanted}"
    obstacle = "there is no reward model" if reward is None else reward.critic_obstacle(policy.tokenizer)
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
    return value_from(policy, cfg.model, seed=cfg.seed), f"critic starts from the policy with a new head{why}"
