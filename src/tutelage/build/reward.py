"""The reward of a run: a reward model, rules, or both, with weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from tutelage.build.data import load_template
from tutelage.build.functions import rule_sources
from tutelage.build.kit import Kit
from tutelage.config.common import ModelConfig
from tutelage.data.chat import ChatTemplate
from tutelage.models.heads import ScalarModel
from tutelage.models.load import context_length
from tutelage.protocols import RewardSource
from tutelage.rewards.mix import RewardMix
from tutelage.rewards.model import RewardModelSource, RewardTemplate, same_tokenizer


@dataclass
class BuiltReward:
    """mix scores rollouts; notes say how the reward model's input is made."""

    mix: RewardMix
    notes: list[str] = field(default_factory=list)


def build_reward(kit: Kit) -> BuiltReward:
    sources: list[RewardSource] = []
    weights: list[float] = []
    notes = []
    if kit.cfg.reward.model is not None:
        source, note = reward_model(kit)
        sources.append(source)
        weights.append(kit.cfg.reward.weight)
        notes.append(note)
    for rule, weight in rule_sources(kit.cfg):
        sources.append(rule)
        weights.append(weight)
    return BuiltReward(RewardMix(sources, weights), notes)


def load_reward_model(kit: Kit, role: str) -> ScalarModel:
    """The reward model that the recipe names, as it was trained, on the ranks of a role."""
    path = kit.cfg.reward.model
    tokenizer = load_template(path, None).tokenizer
    settings = ModelConfig(path=path, dtype=kit.cfg.model.dtype)
    return kit.scalar_model(role, settings, "reward", tokenizer=tokenizer, needs_head=True, frozen=True)


def reward_model(kit: Kit) -> tuple[RewardModelSource, str]:
    """A frozen reward model: on the sampled tokens where tokenizer and template are the policy's, else on text."""
    path = kit.cfg.reward.model
    template = load_template(path, None)
    engine = kit.engine("reward", load_reward_model(kit, "reward"), None)
    shared = same_tokenizer(template.tokenizer, kit.template.tokenizer) and same_rendering(template, kit.template)
    source = RewardModelSource(
        engine.scores,
        None if shared else cast(RewardTemplate, template),
        max_tokens=context_length(path),
        start_ids=[i for i in (template.tokenizer.cls_token_id, template.tokenizer.bos_token_id) if i is not None],
    )
    how = "scores the sampled tokens" if shared else "reads the text, rendered through its own template"
    return source, f"reward model {path} {how}"


def same_rendering(first: ChatTemplate, second: ChatTemplate) -> bool:
    """Whether two templates write a short chat alike."""
    chat = ({"role": "user", "content": "A question."}, {"role": "assistant", "content": "An answer."})
    return first.render(chat) == second.render(chat)
