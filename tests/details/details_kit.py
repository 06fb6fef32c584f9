"""A PPO stage on tiny models, built as a run builds it, and what transformers alone says about the same weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tutelage.algorithms import ppo
from tutelage.build.data import StageData, batch_maker, stage_data
from tutelage.build.stages import Stage, build_stage
from tutelage.config import PPOConfig
from tutelage.engines.engine import ModelEngine
from tutelage.layout import Place
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Prompts, Rollout, Sequences


@dataclass
class Built:
    cfg: PPOConfig
    data: StageData
    stage: Stage
    objects: dict[str, Any]
    roles: RoleSet
    transport: LocalTransport

    def engine(self, role: str) -> ModelEngine:
        if role == "reward":
            return self.objects["reward"].mix.sources[0].scorer.__self__
        return self.objects[role].engine

    def prompts(self) -> Prompts:
        """The prompts of the first step."""
        data = self.data.prepared.train
        return batch_maker(data, self.cfg)(torch.arange(len(data)), 0)

    def collect(self) -> Rollout:
        """The first rollout batch, with logprobs, values and scores."""
        return ppo.collect(self.transport.put(self.prompts()), self.roles, self.cfg).gather()

    def scored(self) -> Rollout:
        return ppo.advantages(self.collect(), ppo.initial_state(self.cfg), self.cfg)[0]

    def update(self, batch: Rollout) -> list[dict[str, Any]]:
        """Every update of one step; statistics by role."""
        pending = ppo.learn(batch, self.roles, self.cfg, ppo.initial_state(self.cfg))
        return [{role: stats.gather() for role, stats in update.items()} for update in pending]


def ppo_config(folder: Path | str, prompts: Path, /, **sections: dict[str, Any]) -> PPOConfig:
    """Temperature 0.7, 8 new tokens, one update a step on 6 prompts, a rule for the reward, unless said otherwise."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder)},
        "data": {"train": str(prompts), "eval_fraction": 0.0},
        "rollout": {"max_new_tokens": 8, "temperature": 0.7, "prompts_per_step": 6},
        "ppo": {"epochs": 1, "minibatches": 1},
        "optim": {"lr": 1e-2, "tokens_per_micro_batch": 64},
        "reward": {"rules": [{"function": "length_range(low=2)"}]},
    }
    for name, section in sections.items():
        defaults[name] = {**defaults.get(name, {}), **section}
    return PPOConfig.model_validate(defaults)


def build(cfg: PPOConfig) -> Built:
    data = stage_data(cfg)
    stage = build_stage(cfg, data)
    built = stage.builder(stage.names, Place())
    stage.notes += built.notes
    transport = LocalTransport()
    roles = RoleSet({name: transport.handle(name, role) for name, role in built.roles.items()})
    return Built(cfg, data, stage, built.roles, roles, transport)


def plain(folder: Path | str) -> PreTrainedModel:
    """The folder's model under transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.no_grad()
def plain_logprobs(model: nn.Module, sequences: Sequences, temperature: float) -> Tensor:
    """(R,) log softmax(logits / temperature) of the response tokens, each sequence alone."""
    rows = []
    for row, prompt in zip(sequences.tokens.rows(), sequences.prompt_lens.tolist(), strict=True):
        logp = torch.log_softmax(model(input_ids=row[None]).logits[0] / temperature, dim=-1)
        rows += [logp[t - 1, row[t]] for t in range(prompt, len(row))]
    return torch.stack(rows)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all weights together."""
    assert ours.keys() == theirs.keys()
    size = math.sqrt(sum(float(g.double().square().sum()) for g in theirs.values()))
    assert size > 1e-4, "a gradient to compare with"
    return math.sqrt(sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours)) / size
