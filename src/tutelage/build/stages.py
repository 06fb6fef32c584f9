"""The roles of each stage, with their engines, evaluators and last words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tutelage.alarms import Alarms
from tutelage.algorithms.reward_model import PairLoss
from tutelage.algorithms.sft import SFTLoss
from tutelage.build.critic import build_critic
from tutelage.build.data import StageData, training_source, write_template
from tutelage.build.device import device
from tutelage.build.functions import load_gold
from tutelage.build.reward import build_reward
from tutelage.config import AnyConfig, PPOConfig, RewardModelConfig, SFTConfig
from tutelage.engines.engine import ModelEngine
from tutelage.evals.answers import HeldOutAnswers, first_prompts
from tutelage.evals.evaluation import Evaluator, HeldOutLoss
from tutelage.models.features import FeatureCache
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.roles.actor import Actor
from tutelage.roles.critic import Critic
from tutelage.roles.learner import Exporting, Learner
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.runfolder import write_json

Progress = Callable[[str, int, int], None]
CENTRED_ON = 4096
"""Chosen training answers whose mean score an exported reward model takes as 0, at most."""


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
        stage = sft_stage(cfg, data)
    elif isinstance(cfg, RewardModelConfig):
        stage = reward_model_stage(cfg, data)
    else:
        stage = ppo_stage(cfg, data)
    stage.notes += warmup_notes(cfg, data)
    return stage


def total_updates(cfg: AnyConfig, data: StageData) -> int:
    """Optimiser updates of a whole run: what the learning rate's schedule spans."""
    _, steps = training_source(cfg, len(data.prepared.train))
    return steps * cfg.ppo.epochs * cfg.ppo.minibatches if isinstance(cfg, PPOConfig) else steps


def warmup_notes(cfg: AnyConfig, data: StageData) -> list[str]:
    """What to say about a warm-up that is longer than the run (a dry run has one)."""
    updates = total_updates(cfg, data)
    if cfg.optim.warmup_steps < updates:
        return []
    return [f"optim.warmup_steps is {cfg.optim.warmup_steps}, the run has {updates} updates: optim.lr is never reached"]


def sft_stage(cfg: SFTConfig, data: StageData) -> Stage:
    policy = load_causal_lm(cfg.model, data.template.tokenizer, seed=cfg.seed, device=device())
    engine = ModelEngine(policy, cfg.optim, total_updates=total_updates(cfg, data))
    held_out, loss = data.prepared.eval, SFTLoss(cfg.sft.aggregation)

    def evaluator(roles: Any, folder: Path) -> Evaluator | None:
        if held_out is None:
            return None
        return HeldOutLoss(roles.actor, held_out, loss, cfg.evaluation.max_rows)

    return Stage({"actor": Learner(engine, exporter(data))}, ("actor",), evaluator)


def reward_model_stage(cfg: RewardModelConfig, data: StageData, features: FeatureCache | None = None) -> Stage:
    """features: hidden states below a frozen trunk, from another model that starts from the same weights."""
    held_out, loss = data.prepared.eval, PairLoss.of(cfg)
    settings = cfg.reward_model
    model = load_scalar_model(
        cfg.model,
        "reward",
        settings.pooling,
        data.template.tokenizer,
        keep_layers=settings.keep_layers,
        seed=cfg.seed,
        device=device(),
    )
    if settings.train_layers == 0:
        model.features = FeatureCache() if features is None else features
    engine = ModelEngine(model, cfg.optim, total_updates=total_updates(cfg, data), train_layers=settings.train_layers)

    def evaluator(roles: Any, folder: Path) -> Evaluator | None:
        if held_out is None:
            return None
        return HeldOutLoss(roles.reward, held_out, loss, cfg.evaluation.max_rows)

    exporting = centred_exporter(data, engine) if settings.centre_on_chosen else exporter(data)
    return Stage({"reward": Learner(engine, exporting)}, ("reward",), evaluator)


def ppo_stage(cfg: PPOConfig, data: StageData) -> Stage:
    updates = total_updates(cfg, data)
    temperature, uses_lora = cfg.rollout.temperature, cfg.model.lora_rank > 0
    policy = load_causal_lm(cfg.model, data.template.tokenizer, seed=cfg.seed, device=device())
    engine = ModelEngine(policy, cfg.optim, total_updates=updates, temperature=temperature)
    reference = engine if uses_lora else engine.snapshot()
    reward = build_reward(cfg, data)
    critic, critic_note = build_critic(cfg, policy, reward.model, updates)
    rollout = InProcessRollout(
        policy.model,
        data.template.tokenizer,
        data.template.eos_ids,
        SamplingParams(
            temperature=temperature, max_new_tokens=cfg.rollout.max_new_tokens, stop=tuple(cfg.rollout.stop)
        ),
        seed=cfg.seed,
        tokens_in_flight=cfg.rollout.tokens_in_flight,
        forward_context=engine.forward_context,
        response_prefix=data.template.response_prefix,
    )
    held_out, gold = data.prepared.eval, load_gold(cfg)

    def evaluator(roles: Any, folder: Path) -> Evaluator | None:
        if held_out is None:
            return None
        prompts = first_prompts(held_out, cfg.evaluation.prompts)
        return HeldOutAnswers(roles, prompts, gold, folder, cfg.kl.coef)

    def report_progress(progress: Progress) -> None:
        rollout.progress = lambda done, total: progress("rollout", done, total)

    return Stage(
        roles={
            "actor": Actor(engine, rollout, temperature, exporter(data)),
            "critic": Critic(critic),
            "reference": Reference(reference, temperature, adapter=not uses_lora),
            "reward": Reward(reward.mix),
        },
        learners=("actor", "critic"),
        evaluator=evaluator,
        alarms=Alarms(cfg),
        finish=lambda roles: {"reward_inputs_cut": roles.reward.cut_inputs().gather() or None},
        notes=[*reward.notes, critic_note],
        report_progress=report_progress,
    )


def exporter(data: StageData) -> Exporting:
    """What a model folder needs besides the model: which template it was trained with."""

    @contextmanager
    def exporting(folder: Path) -> Iterator[None]:
        yield
        write_template(data.template, folder)

    return exporting


def centred_exporter(data: StageData, engine: ModelEngine) -> Exporting:
    """Every model folder that is written has its bias shifted so that chosen training answers score 0 on average.

    (Stiennon et al. 2020.)  The shift is in `centring.json` beside the model; the running model keeps its own bias.
    """
    chosen = data.prepared.train.chosen
    sample = chosen.select(torch.arange(min(len(chosen), CENTRED_ON)))

    @contextmanager
    def exporting(folder: Path) -> Iterator[None]:
        shift = -float(engine.scores(sample).double().mean())
        with engine.shifted_bias(shift), exporter(data)(folder):
            yield
        write_json(folder / "centring.json", {"bias_shift": shift, "chosen_answers": len(sample)})

    return exporting
