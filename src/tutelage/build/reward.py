"""The reward of a PPO run: a reward model, rules, or both, with weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from tutelage.build.data import StageData, load_template
from tutelage.build.device import device
from tutelage.build.functions import rule_sources
from tutelage.config import PPOConfig
from tutelage.config.common import ModelConfig
from tutelage.data.chat import ChatTemplate
from tutelage.engines.engine import ModelEngine
from tutelage.models.heads import ScalarModel
from tutelage.models.load import context_length, load_scalar_model
from tutelage.protocols import RewardSource
from tutelage.rewards.mix import RewardMix
from tutelage.rewards.model import RewardModelSource, RewardTemplate, same_tokenizer


@dataclass
class BuiltReward:
    """mix scores rollouts; model is the reward model, where there is one; notes say how its input is made."""

    mix: RewardMix
    model: ScalarModel | None = None
    notes: list[str] = field(default_factory=list)


def build_reward(cfg: PPOConfig, data: StageData) -> BuiltReward:
    sources: list[RewardSource] = []
    weights: list[float] = []
    model, notes = None, []
    if cfg.reward.model is not None:
        source, model, note = reward_model(cfg.reward.model, cfg, data)
        sources.append(source)
        weights.append(cfg.reward.weight)
        notes.append(note)
    for rule, weight in rule_sources(cfg):
        sources.append(rule)
        weights.append(weight)
    return BuiltReward(RewardMix(sources, weights), model, notes)


def reward_model(path: str, cfg: PPOConfig, data: StageData) -> tuple[RewardModelSource, ScalarModel, str]:
    """A frozen reward model: on the sampled tokens where tokenizer and template are the policy's, else on text."""
    template = load_template(path, None)
    model = load_scalar_model(
        ModelConfig(path=path, dtype=cfg.model.dtype),
        "reward",
        "auto",
        template.tokenizer,
        needs_head=True,
        device=device(),
    )
    engine = ModelEngine.frozen(model, cfg.optim)
    shared = same_tokenizer(template.tokenizer, data.template.tokenizer) and same_rendering(template, data.template)
    source = RewardModelSource(
        engine.scores,
        None if shared else cast(RewardTemplate, template),
        max_tokens=context_length(path),
        start_ids=[i for i in (template.tokenizer.cls_token_id, template.tokenizer.bos_token_id) if i is not None],
    )
    how = "scores the sampled tokens" if shared else "reads the text, rendered through its own template"
    return source, model, f"reward model {path} {how}"


def same_rendering(first: ChatTemplate, second: ChatTemplate) -> bool:
    """Whether two templates write a short chat alike."""
    chat = ({"role": "user", "content": "A question."}, {"role": "assistant", "content": "An answer."})
    return first.render(chat) == second.render(chat)
