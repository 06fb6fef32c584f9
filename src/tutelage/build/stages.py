"""The roles of each stage, with their engines, evaluators and last words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutelage.alarms import Alarms
from tutelage.algorithms.reward_model import PairLoss
from tutelage.algorithms.sft import SFTLoss
from tutelage.build.data import StageData, training_source
from tutelage.build.functions import load_gold, rule_sources
from tutelage.config import AnyConfig, PPOConfig, RewardModelConfig, SFTConfig
from tutelage.engines.local import LocalEngine
from tutelage.errors import ModelError
from tutelage.evals.answers import HeldOutAnswers, first_prompts
from tutelage.evals.evaluation import Evaluator, HeldOutLoss
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.roles.actor import Actor
from tutelage.roles.critic import Critic
from tutelage.roles.learner import Learner
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams

Progress = Callable[[str, int, int], None]


@dataclass
class Stage:
    """roles by name; learners: those with state, the exported one first; notes: what was decided while building."""

    roles: dict[str, Any]
    learners: tuple[str, ...]
    evaluator: Callable[[Any, Path], Evaluator | None]
    alarms: Alarms | None = None
    finish: Callable[[Any], Mapping[str, Any]] | None = None
    notes: list[str] = field(default_factory=list)
    report_progress: Callable[[Progress], None] = lambda progress: None


def build_stage(cfg: AnyConfig, data: StageData) -> Stage:
    if isinstance(cfg, SFTConfig):
        return sft_stage(cfg, data)
    if isinstance(cfg, RewardModelConfig):
        return reward_model_stage(cfg, data)
    return ppo_stage(cfg, data)


def sft_stage(cfg: SFTConfig, data: StageData) -> Stage:
    _, steps = training_source(cfg, len(data.prepared.train))
    engine = LocalEngine(load_causal_lm(cfg.model), cfg.optim, total_updates=steps)
    held_out, loss = data.prepared.eval, SFTLoss(cfg.sft.aggregation)

    def evaluator(roles: Any, folder: Path) -> Evaluator | None:
        if not len(held_out):
            return None
        return HeldOutLoss(roles.actor, held_out, loss, cfg.evaluation.max_rows)

    return Stage({"actor": Learner(engine)}, ("actor",), evaluator)


def reward_model_stage(cfg: RewardModelConfig, data: StageData) -> Stage:
    train, held_out, loss = data.prepared.train, data.prepared.eval, PairLoss.of(cfg)
    _, steps = training_source(cfg, len(train))
    settings = cfg.reward_model
    model = load_scalar_model(cfg.model, kind="reward", pooling=settings.pooling)
    engine = LocalEngine(model, cfg.optim, total_updates=steps, train_layers=settings.train_layers)

    def evaluator(roles: Any, folder: Path) -> Evaluator | None:
        return HeldOutLoss(roles.reward, held_out, loss, cfg.evaluation.max_rows) if len(held_out) else None

    def centre(roles: Any) -> Mapping[str, Any]:
        """Shift the bias so that chosen training answers score 0 on average (arXiv:2403.17031, reward normalisation)."""
        mean = float(roles.reward.scores(train.chosen).gather().double().mean())
        engine.shift_bias(-mean)
        return {"bias_shift": -mean}

    finish = centre if settings.centre_on_chosen else None
    return Stage({"reward": Learner(engine)}, ("reward",), evaluator, finish=finish)


def ppo_stage(cfg: PPOConfig, data: StageData) -> Stage:
    _, steps = training_source(cfg, len(data.prepared.train))
    updates = steps * cfg.ppo.epochs * cfg.ppo.minibatches
    temperature = cfg.rollout.temperature
    policy = load_causal_lm(cfg.model)
    engine = LocalEngine(policy, cfg.optim, total_updates=updates)
    uses_lora = cfg.model.lora_rank > 0
    reference = engine if uses_lora else LocalEngine.frozen(policy.snapshot(), cfg.optim)
    sources, reward_notes = reward_sources(cfg, data)
    critic, critic_note = build_critic(cfg, policy, sources.model, updates)
    rollout = InProcessRollout(
        policy.model,
        data.template.tokenizer,
        data.template.special.eos_ids,
        SamplingParams(
            temperature=temperature, max_new_tokens=cfg.rollout.max_new_tokens, stop=tuple(cfg.rollout.stop)
        ),
        seed=cfg.seed,
        tokens_in_flight=cfg.rollout.tokens_in_flight,
        forward_context=engine.forward_context,
    )
    held_out, gold = first_prompts(data.prepared.eval, cfg.evaluation.prompts), load_gold(cfg)

    def evaluator(roles: Any, folder: Path) -> Evaluator | None:
        return HeldOutAnswers(roles, held_out, gold, folder, cfg.kl.coef) if len(held_out) else None

    def report_progress(progress: Progress) -> None:
        rollout.progress = lambda done, total: progress("rollout", done, total)

    return Stage(
        roles={
            "actor": Actor(engine, rollout, temperature),
            "critic": Critic(critic),
            "reference": Reference(reference, temperature, adapter=not uses_lora),
            "reward": Reward(sources.mix),
        },
        learners=("actor", "critic"),
        evaluator=evaluator,
        alarms=Alarms(cfg),
        notes=[*reward_notes, critic_note],
        report_progress=report_progress,
    )
