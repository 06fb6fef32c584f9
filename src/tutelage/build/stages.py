"""What build knows of each algorithm: its data, roles, evaluation and last words, in one visible dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tutelage.alarms import Alarms, Watching
from tutelage.algorithms import kto
from tutelage.algorithms.distill import roles_needed as distill_roles
from tutelage.algorithms.dpo import roles_needed as dpo_roles
from tutelage.algorithms.grpo import roles_needed
from tutelage.algorithms.raft import roles_needed as raft_roles
from tutelage.algorithms.reward_model import loss_of
from tutelage.algorithms.sft import SFTLoss
from tutelage.build import distillation, online, preference, roles
from tutelage.build.critic import on_own_model
from tutelage.build.data import StageData, section, training_source
from tutelage.build.environments import has_environments
from tutelage.build.functions import held_out_rules, load_gold
from tutelage.build.generation import ROLLOUT, generates_elsewhere, generator
from tutelage.build.kit import Facts
from tutelage.build.roles import RoleMaker, StageRoles
from tutelage.config import AnyConfig
from tutelage.evals.answers import HeldOutAnswers, Judging, first_prompts
from tutelage.evals.evaluation import Evaluator, HeldOutLoss
from tutelage.evals.sample_alarms import SampleAlarms
from tutelage.types import Sequences

CENTRED_ON = 4096
"""Chosen training answers whose mean score an exported reward model takes as 0, at most."""

EvaluatorOf = Callable[[Any, StageData, Any, Path], Evaluator | None]


def no_last_word(roles: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class StageSpec:
    """makers     role -> its maker, for every role the algorithm may use.
    learners   roles with state; the first is the one that is exported.
    evaluator  (config, data, handles, run folder) -> how held-out quality is measured, or None.
    used       config -> the roles this run needs; default: all.
    updates    config -> optimiser updates of one step.
    alarms     config -> what to watch, or None.
    finish     handles -> what the summary says besides.
    centring   (config, data) -> answers that an exported reward model is centred on, or None.
    of_run     (config, data) -> the fields above that this run has otherwise, such as another maker of a role.
    """

    makers: dict[str, RoleMaker]
    learners: tuple[str, ...]
    evaluator: EvaluatorOf
    used: Callable[[Any], tuple[str, ...]] | None = None
    updates: Callable[[Any], int] = lambda cfg: 1
    alarms: Callable[[Any], Watching | None] = lambda cfg: None
    finish: Callable[[Any], Mapping[str, Any]] = no_last_word
    centring: Callable[[Any, StageData], Sequences | None] = lambda cfg, data: None
    of_run: Callable[[Any, StageData], Mapping[str, Any]] = lambda cfg, data: {}


@dataclass
class Stage:
    """One run's: builder makes `names` wherever they run; notes: what was decided so far."""

    spec: StageSpec
    builder: StageRoles
    names: tuple[str, ...]
    notes: list[str] = field(default_factory=list)


def build_stage(cfg: AnyConfig, data: StageData) -> Stage:
    """Nothing is loaded yet: a transport calls the builder where the roles run."""
    spec = STAGES[cfg.algorithm]
    spec = replace(spec, **spec.of_run(cfg, data))
    updates = total_updates(cfg, data)
    facts = Facts(cfg, updates, spec.centring(cfg, data))
    names = spec.used(cfg) if spec.used else tuple(spec.makers)
    makers = dict(spec.makers)
    if hasattr(cfg, "rollout") and generates_elsewhere(cfg):
        names, makers[ROLLOUT] = (*names, ROLLOUT), generator
    return Stage(spec, StageRoles(facts, makers), names, warmup_notes(cfg, updates))


def total_updates(cfg: AnyConfig, data: StageData) -> int:
    """Optimiser updates of a whole run: what the learning rate's schedule spans."""
    _, steps = training_source(cfg, len(data.prepared.train))
    return steps * STAGES[cfg.algorithm].updates(cfg)


def warmup_notes(cfg: AnyConfig, updates: int) -> list[str]:
    """What to say about a warm-up that is longer than the run (a dry run has one)."""
    if cfg.optim.warmup_steps < updates:
        return []
    return [f"optim.warmup_steps is {cfg.optim.warmup_steps}, the run has {updates} updates: optim.lr is never reached"]


def held_out_loss(role: str, loss: Callable[[Any], Any]) -> EvaluatorOf:
    """The training loss of one role on the held-out rows."""

    def evaluator(cfg: Any, data: StageData, handles: Any, folder: Path) -> Evaluator | None:
        if data.prepared.eval is None:
            return None
        return HeldOutLoss(getattr(handles, role), data.prepared.eval, loss(cfg), cfg.evaluation.max_rows)

    return evaluator


def held_out_unpaired(cfg: Any, data: StageData, handles: Any, folder: Path) -> Evaluator | None:
    """The `kto` stage's loss on held-out answers; the reference, which never changes, is asked once."""
    if data.prepared.eval is None:
        return None

    def with_reference(answers: Any) -> Any:
        return answers.adding(ref_logp=handles.reference.logprobs(answers).gather())

    rows = cfg.evaluation.max_rows
    return HeldOutLoss(handles.actor, data.prepared.eval, kto.held_out_loss(cfg), rows, with_reference)


def answers(kl_coef: Callable[[Any], float]) -> EvaluatorOf:
    """Answers to held-out prompts, by proxy, gold and rules; kl_coef(config): what a nat of KL costs in quality."""

    def evaluator(cfg: Any, data: StageData, handles: Any, folder: Path) -> Evaluator | None:
        if data.prepared.eval is None:
            return None
        prompts = first_prompts(data.prepared.eval, cfg.evaluation.prompts)
        return HeldOutAnswers(handles, prompts, load_gold(cfg), folder, kl_coef(cfg), judging(cfg))

    return evaluator


held_out_answers = answers(lambda cfg: float(cfg.kl.coef))


def judging(cfg: Any) -> Judging:
    """How held-out answers are judged, as the recipe says."""
    said = cfg.evaluation
    skip = cfg.reward.on_error == "skip" or has_environments(cfg)
    return Judging(held_out_rules(cfg), said.samples, said.greedy, tuple(said.pass_at), skip)


def chosen_sample(cfg: Any, data: StageData) -> Sequences | None:
    if cfg.reward_model.scores_steps or not cfg.reward_model.centre_on_chosen:
        return None
    chosen = data.prepared.train.chosen
    return chosen.select(torch.arange(min(len(chosen), CENTRED_ON)))


def inputs_cut(handles: Any) -> Mapping[str, Any]:
    """Inputs of reward models that lost their start, summed over the ranks that scored."""
    total: Counter[str] = Counter()
    for rank in handles.reward.cut_inputs().gather():
        total.update(rank)
    return {"reward_inputs_cut": dict(total) or None}


def without_critic(cfg: Any, data: StageData) -> Mapping[str, Any]:
    """No role of its own for a critic on the actor's trunk."""
    if on_own_model(cfg):
        return {}
    return {
        "makers": {"actor": roles.actor, "reference": roles.reference, "reward": roles.reward},
        "learners": ("actor",),
    }


def several_updates(cfg: Any) -> int:
    """Optimiser updates of a step that learns from one batch in several passes and parts."""
    return section(cfg).epochs * section(cfg).minibatches


STAGES: dict[str, StageSpec] = {
    "sft": StageSpec(
        makers={"actor": roles.learning_policy},
        learners=("actor",),
        evaluator=held_out_loss("actor", SFTLoss.of),
    ),
    "reward_model": StageSpec(
        makers={"reward": roles.learning_reward},
        learners=("reward",),
        evaluator=held_out_loss("reward", loss_of),
        centring=chosen_sample,
    ),
    "ppo": StageSpec(
        makers={
            "actor": roles.actor,
            "critic": roles.critic,
            "reference": roles.reference,
            "reward": roles.reward,
        },
        learners=("actor", "critic"),
        evaluator=held_out_answers,
        updates=several_updates,
        alarms=Alarms,
        finish=inputs_cut,
        of_run=without_critic,
    ),
    "grpo": StageSpec(
        makers={"actor": roles.actor, "reference": roles.reference, "reward": roles.reward},
        learners=("actor",),
        used=roles_needed,
        evaluator=held_out_answers,
        updates=several_updates,
        alarms=Alarms,
        finish=inputs_cut,
    ),
    "online_dpo": StageSpec(
        makers={"actor": roles.actor, "reference": roles.reference, "reward": roles.reward},
        learners=("actor",),
        evaluator=answers(online.kl_coef),
        updates=several_updates,
        finish=inputs_cut,
        of_run=online.of_run,
    ),
    "xpo": StageSpec(
        makers={"actor": roles.actor, "reference": online.answering_reference, "reward": roles.reward},
        learners=("actor",),
        evaluator=answers(online.kl_coef),
        updates=several_updates,
        finish=inputs_cut,
        of_run=online.of_run,
    ),
    "nash_md": StageSpec(
        makers={"actor": roles.actor, "reference": online.mixing_reference, "reward": roles.reward},
        learners=("actor",),
        evaluator=answers(online.kl_coef),
        updates=lambda cfg: int(cfg.nash_md.minibatches),
        finish=inputs_cut,
        of_run=online.of_run,
    ),
    "distill": StageSpec(
        makers={"actor": roles.actor, "teacher": distillation.teacher, "reward": roles.reward},
        learners=("actor",),
        evaluator=distillation.held_out_distance,
        used=distill_roles,
        updates=several_updates,
        alarms=SampleAlarms,
        finish=lambda handles: inputs_cut(handles) if "reward" in handles else {},
        of_run=distillation.of_run,
    ),
    "raft": StageSpec(
        makers={"actor": roles.actor, "reference": roles.reference, "reward": roles.reward},
        learners=("actor",),
        evaluator=held_out_answers,
        used=raft_roles,
        updates=several_updates,
        alarms=SampleAlarms,
        finish=inputs_cut,
    ),
    "dpo": StageSpec(
        makers={"actor": preference.policy, "reference": roles.reference},
        learners=("actor",),
        evaluator=preference.held_out_pairs,
        used=dpo_roles,
        of_run=preference.of_run,
    ),
    "kto": StageSpec(
        makers={"actor": roles.learning_policy, "reference": roles.reference},
        learners=("actor",),
        evaluator=held_out_unpaired,
    ),
}
