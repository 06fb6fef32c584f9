"""What the roles of one process are made of: template, policy, reward model, engines.  Each is loaded once.

A kit is made where the roles will run, which may be another process than the controller's: it needs the settings of
the run and a few numbers, nothing that was loaded elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tutelage.build.data import load_template, write_template
from tutelage.config import AnyConfig
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.data.chat import ChatTemplate
from tutelage.engines.engine import ModelEngine
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import Alone, MeshRanks, Ranks
from tutelage.layout import Place
from tutelage.models.heads import Kind, ScalarModel, fresh_head
from tutelage.models.language_model import LanguageModel
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.models.sharding import Sharding
from tutelage.models.shared_base import SharedModels
from tutelage.roles.learner import Exporting
from tutelage.types import Sequences


@dataclass(frozen=True)
class Facts:
    """What the controller knows and the roles need: picklable.

    updates   optimiser updates of the whole run.
    centring  answers whose mean score an exported reward model takes as 0.
    """

    cfg: AnyConfig
    updates: int
    centring: Sequences | None = None


@dataclass
class Kit:
    """Shared by the roles of one process.

    names  which roles these are.
    notes  what was decided while building.
    share  makes the models that stand on one base, where the recipe has one.
    """

    facts: Facts
    names: tuple[str, ...]
    place: Place
    notes: list[str] = field(default_factory=list)
    share: Callable[[Kit], SharedModels] | None = None

    @property
    def cfg(self) -> Any:
        return self.facts.cfg

    @property
    def device(self) -> str:
        return self.place.device

    @cached_property
    def template(self) -> ChatTemplate:
        return load_template(self.cfg.model.path, self.cfg.model.chat_template)

    @cached_property
    def meshes(self) -> RankMeshes:
        return RankMeshes()

    def ranks(self, role: str) -> Ranks:
        """The ranks that hold a role's model together."""
        layout = self.place.layout(role)
        offload = self.cfg.cluster.settings_of(role).offload
        if layout.size == 1 and not offload:
            return Alone()
        return MeshRanks(self.meshes.of(layout, self.device), offload=offload)

    def sharding(self, role: str) -> Sharding | None:
        """How a role's weights are spread over its ranks; None where every rank holds them all."""
        ranks = self.ranks(role)
        return ranks.sharding() if isinstance(ranks, MeshRanks) else None

    @cached_property
    def shared(self) -> SharedModels | None:
        """The models of this process on one base; None where each has weights of its own, or where none is here."""
        if self.share is None or not self.cfg.model.shared_base or "actor" not in self.names:
            return None
        return self.share(self)

    @cached_property
    def policy(self) -> LanguageModel:
        """The policy that is trained; at the start the model folder's weights.  With a value head, where the recipe
        puts the critic on its trunk."""
        if self.shared is not None:
            return self.shared.policy
        policy = self._policy("actor", self.cfg.model, frozen=False)
        critic = getattr(self.cfg, "critic", None)
        if critic is not None and critic.trunk == "actor":
            head = fresh_head("value", policy.trunk.hidden_size, "last", self.cfg.seed).layers["score"]
            policy.add_value_head(head, detach=critic.detach_trunk)
            self.notes.append("critic is a new value head on the actor's trunk")
        return policy

    def frozen_policy(self, role: str, *, as_trained: bool = False) -> LanguageModel:
        """The policy as it was passed in, without the adapter of this run, on the ranks of a role.

        as_trained: its base is quantised where the policy's is, so that both are one function at the start.
        """
        quantize = self.cfg.model.quantize if as_trained else "none"
        settings = self.cfg.model.model_copy(
            update={"lora_rank": 0, "gradient_checkpointing": False, "quantize": quantize}
        )
        return self._policy(role, settings, frozen=True)

    def _policy(self, role: str, settings: ModelConfig, *, frozen: bool) -> LanguageModel:
        tokenizer, sharding = self.template.tokenizer, self.sharding(role)
        return load_causal_lm(
            settings, tokenizer, seed=self.cfg.seed, device=self.device, sharding=sharding, frozen=frozen
        )

    def scalar_model(self, role: str, settings: ModelConfig, kind: Kind, **more: Any) -> ScalarModel:
        """A reward model or a critic on the ranks of a role."""
        sharding = self.sharding(role)
        return load_scalar_model(settings, kind, seed=self.cfg.seed, device=self.device, sharding=sharding, **more)

    @cached_property
    def policy_engine(self) -> ModelEngine:
        rollout = getattr(self.cfg, "rollout", None)
        temperature = 1.0 if rollout is None else rollout.temperature
        return self.engine("actor", self.policy, self.cfg.optim, temperature=temperature)

    def engine(self, role: str, model: Any, optim: OptimConfig | None, **settings: Any) -> ModelEngine:
        """The engine of a role on its ranks; `optim` None: frozen."""
        ranks = self.ranks(role)
        if optim is None:
            return ModelEngine.frozen(model, self.cfg.optim, ranks=ranks)
        schedule = self.cfg.cluster.settings_of(role).pipeline_schedule
        return ModelEngine(model, optim, total_updates=self.facts.updates, ranks=ranks, schedule=schedule, **settings)

    def exporter(self) -> Exporting:
        """What a model folder needs besides the model: which template it was trained with."""

        @contextmanager
        def exporting(folder: Path) -> Iterator[None]:
            yield
            if self.place.rank == 0:
                write_template(self.template, folder)

        return exporting
