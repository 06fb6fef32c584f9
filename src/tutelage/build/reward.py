"""The reward of a run: a reward model, an ensemble of them, and rules, with weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from tutelage.build.data import load_template
from tutelage.build.environments import has_environments
from tutelage.build.functions import rule_sources
from tutelage.build.kit import Kit
from tutelage.build.reward_models import step_settings
from tutelage.config.common import ModelConfig
from tutelage.data.chat import ChatTemplate
from tutelage.engines.engine import ModelEngine
from tutelage.models.heads import ScalarModel
from tutelage.models.load import context_length
from tutelage.protocols import RewardSource
from tutelage.rewards.ensemble import EnsembleDisagreement, EnsembleSource
from tutelage.rewards.mix import RewardMix
from tutelage.rewards.model import RewardModelSource, RewardTemplate, same_tokenizer
from tutelage.rewards.process import StepScorer
from tutelage.roles.reward import Mix
from tutelage.rollout.environments.scoring import EpisodeErrors, EpisodeReward


@dataclass
class BuiltReward:
    """mix scores rollouts; notes say how the reward model's input is made."""

    mix: Mix
    notes: list[str] = field(default_factory=list)


def build_reward(kit: Kit) -> BuiltReward:
    sources: list[RewardSource] = []
    weights: list[float] = []
    notes = []
    if kit.cfg.reward.model is not None:
        source, note = reward_model(kit, kit.cfg.reward.model)
        sources.append(source)
        weights.append(kit.cfg.reward.weight)
        notes.append(note)
    if kit.cfg.reward.ensemble:
        ensemble, said = reward_ensemble(kit)
        sources += [ensemble, EnsembleDisagreement(ensemble)]
        weights += [kit.cfg.reward.ensemble_weight, 0.0]
        notes += said
    for rule, weight in rule_sources(kit.cfg):
        sources.append(rule)
        weights.append(weight)
    if has_environments(kit.cfg):
        sources.append(EpisodeReward())
        weights.append(0.0)
        return BuiltReward(EpisodeErrors(RewardMix(sources, weights, kit.cfg.reward.on_error)), notes)
    return BuiltReward(RewardMix(sources, weights, kit.cfg.reward.on_error), notes)


def load_reward_model(kit: Kit, role: str, path: str | None = None) -> ScalarModel:
    """A reward model (default: `reward.model`) as it was trained, on the ranks of a role or on the shared base."""
    path = path or kit.cfg.reward.model
    if kit.shared is not None and path in kit.shared.rewards:
        return kit.shared.rewards[path]
    tokenizer = load_template(path, None).tokenizer
    settings = ModelConfig(path=path, dtype=kit.cfg.model.dtype)
    return kit.scalar_model(role, settings, "reward", tokenizer=tokenizer, needs_head=True, frozen=True)


def reward_ensemble(kit: Kit) -> tuple[EnsembleSource, list[str]]:
    """The reward models of `reward.ensemble` as one source, each told apart by a note."""
    settings = kit.cfg.reward
    built = [reward_model(kit, path) for path in settings.ensemble]
    sources = [source for source, _ in built]
    for number, source in enumerate(sources, start=1):
        source.name = f"reward_model_{number}"
    ensemble = EnsembleSource(sources, settings.combine, settings.variance_weight)
    return ensemble, [note for _, note in built]


def reward_model(kit: Kit, path: str) -> tuple[RewardModelSource, str]:
    """A frozen reward model: on the sampled tokens where tokenizer and template are the policy's, else on text."""
    template = load_template(path, None)
    engine = kit.engine("reward", load_reward_model(kit, "reward", path), None)
    about = step_settings("reward.model", path, kit.cfg.reward.steps)
    shared = same_tokenizer(template.tokenizer, kit.template.tokenizer) and same_rendering(template, kit.template)
    source = RewardModelSource(
        engine.scores if about is None else step_scorer(kit, engine, template, about),
        None if shared else cast(RewardTemplate, template),
        max_tokens=context_length(path),
        start_ids=[i for i in (template.tokenizer.cls_token_id, template.tokenizer.bos_token_id) if i is not None],
    )
    how = "scores the sampled tokens" if shared else "reads the text, rendered through its own template"
    if about is not None:
        how += f"; a score is the {kit.cfg.reward.steps or DEFAULT_STEPS} of its steps'"
    return source, f"reward model {path} {how}"


DEFAULT_STEPS = "min"


def step_scorer(kit: Kit, engine: ModelEngine, template: ChatTemplate, about: dict[str, Any]) -> StepScorer:
    return StepScorer(
        engine.token_scores,
        template.tokenizer,
        about["separator"],
        kit.cfg.reward.steps or DEFAULT_STEPS,
        probabilities=about["loss"] == "step_bce",
    )


def same_rendering(first: ChatTemplate, second: ChatTemplate) -> bool:
    """Whether two templates write a short chat alike."""
    chat = ({"role": "user", "content": "A question."}, {"role": "assistant", "content": "An answer."})
    return first.render(chat) == second.render(chat)
