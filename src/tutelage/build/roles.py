"""The roles themselves, one maker each, and the builder that a transport calls where they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tutelage.build.critic import build_critic
from tutelage.build.generation import beside_actor, sender
from tutelage.build.kit import Facts, Kit
from tutelage.build.reward import build_reward
from tutelage.build.reward_models import STEPS_FILE
from tutelage.build.shared_base import require_shared_base, shared_models
from tutelage.config import RewardModelConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ModelError
from tutelage.layout import Built, Place
from tutelage.models.features import FeatureCache
from tutelage.roles.actor import Actor
from tutelage.roles.critic import Critic
from tutelage.roles.learner import Exporting, Learner
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.runfolder import write_json

RoleMaker = Callable[[Kit], Any]


@dataclass(frozen=True)
class StageRoles:
    """A `layout.RoleBuilder`: picklable, called once in every process of a pool with the roles of that pool.

    Raises ConfigError where the recipe wants one base for roles that cannot share it.
    """

    facts: Facts
    makers: dict[str, RoleMaker]

    def __post_init__(self) -> None:
        require_shared_base(self.facts.cfg, tuple(self.makers))

    def __call__(self, names: tuple[str, ...], place: Place) -> Built:
        torch.manual_seed(self.facts.cfg.seed)
        kit = Kit(self.facts, names, place, share=shared_models)
        roles = {name: self.makers[name](kit) for name in names}
        return Built(roles, tuple(kit.notes))


def learning_policy(kit: Kit) -> Learner:
    """The policy trained on data alone."""
    return Learner(kit.policy_engine, kit.exporter())


def actor(kit: Kit) -> Actor:
    """The policy trained on its own rollouts."""
    engine, temperature = kit.policy_engine, kit.cfg.rollout.temperature
    rollout, partial = beside_actor(kit, engine)
    return Actor(engine, rollout, temperature, kit.exporter(), sender(kit), partial)


def reference(kit: Kit) -> Reference:
    """The policy as it was passed in: beside the actor its snapshot or its base, elsewhere loaded once more."""
    cfg = kit.cfg
    rollout = getattr(cfg, "rollout", None)
    temperature = 1.0 if rollout is None else rollout.temperature
    beside = "actor" in kit.names and kit.place.layout("actor") == kit.place.layout("reference")
    if beside and cfg.model.lora_rank:
        return Reference(kit.policy_engine, temperature, adapter=False)
    if beside:
        return Reference(kit.policy_engine.snapshot(), temperature, adapter=True)
    return Reference(
        kit.engine("reference", kit.frozen_policy("reference", as_trained=True), None), temperature, adapter=True
    )


def reward(kit: Kit) -> Reward:
    """A frozen reward model, rules, or both."""
    built = build_reward(kit)
    kit.notes += built.notes
    return Reward(built.mix)


def critic(kit: Kit) -> Critic:
    engine, note = build_critic(kit)
    kit.notes += [] if note is None else [note]
    return Critic(engine)


def learning_reward(kit: Kit, features: FeatureCache | None = None) -> Learner:
    """The reward model under training.  features: pooled states of a frozen trunk that starts from the same weights."""
    cfg: RewardModelConfig = kit.cfg
    settings = cfg.reward_model
    model = kit.scalar_model(
        "reward",
        cfg.model,
        "reward",
        pooling="last" if settings.scores_steps else settings.pooling,
        tokenizer=kit.template.tokenizer,
        keep_layers=settings.keep_layers,
    )
    if settings.scores_steps and not model.trunk.causal:
        raise ModelError(
            f"{cfg.model.path} is an encoder, whose tokens see the steps that come after them",
            fix="give a decoder for reward_model.loss step_bce and step_mse",
        )
    if settings.train_layers == 0 and not settings.scores_steps:
        model.features = FeatureCache() if features is None else features
    engine = kit.engine("reward", model, cfg.optim, train_layers=settings.train_layers)
    if settings.scores_steps:
        return Learner(engine, steps_exporter(kit))
    return Learner(engine, centred_exporter(kit, engine) if settings.centre_on_chosen else kit.exporter())


def steps_exporter(kit: Kit) -> Exporting:
    """Every model folder that is written says that the model scores steps, and how they are told apart."""
    settings = kit.cfg.reward_model

    @contextmanager
    def exporting(folder: Path) -> Iterator[None]:
        with kit.exporter()(folder):
            yield
        if kit.place.rank == 0:
            write_json(folder / STEPS_FILE, {"separator": settings.step_separator, "loss": settings.loss})

    return exporting


def centred_exporter(kit: Kit, engine: ModelEngine) -> Exporting:
    """Every model folder that is written has its bias shifted so that chosen training answers score 0 on average.

    (Stiennon et al. 2020.)  The shift is in `centring.json` beside the model; the running model keeps its own bias.
    """
    sample = kit.facts.centring
    assert sample is not None, "the controller names the answers to centre on"

    @contextmanager
    def exporting(folder: Path) -> Iterator[None]:
        shift = -float(engine.scores(sample).double().mean())
        with engine.shifted_bias(shift), kit.exporter()(folder):
            yield
        if kit.place.rank == 0:
            write_json(folder / "centring.json", {"bias_shift": shift, "chosen_answers": len(sample)})

    return exporting
