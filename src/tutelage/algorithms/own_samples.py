"""What algorithms share that learn from the policy's own samples without a policy ratio: state, order, weights.

Shapes: B sequences, T response tokens, R flat response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tutelage.algorithms.policy import counted_weights
from tutelage.config.distill import DistillConfig, DistillSettings
from tutelage.config.raft import RAFTConfig, RAFTSettings
from tutelage.math.keyed import keyed_permutation, sample_key
from tutelage.types import Ragged, Rollout

Config = DistillConfig | RAFTConfig


@dataclass(frozen=True)
class StepState:
    """What a step depends on besides weights."""

    step: int

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}


def initial_state(cfg: Any) -> StepState:
    return StepState(0)


def state_from(saved: Mapping[str, Any]) -> StepState:
    return StepState(saved["step"])


def settings_of(cfg: Config) -> DistillSettings | RAFTSettings:
    """The section of the algorithm, which has its name."""
    return getattr(cfg, cfg.algorithm)


def generate(prompts: Any, roles: Any, cfg: Any) -> Any:
    """Prompts -> rollouts, which a schedule may begin ahead of their step."""
    return roles.actor.generate(prompts)


def shuffled(seed: int, step: int) -> Callable[[int, int], Tensor]:
    """(pass, number of items) -> the order of the items, keyed by (seed, step, pass)."""

    def order(epoch: int, n: int) -> Tensor:
        return keyed_permutation(n, sample_key(seed, step, "minibatches", epoch, "shuffle"))

    return order


def updates_of(batch: Any, cfg: Config, step: int) -> Iterator[Any]:
    """`epochs` passes over the batch, each in `minibatches` parts, in an order keyed by (seed, step, pass)."""
    settings = settings_of(cfg)
    return batch.minibatches(settings.epochs, settings.minibatches, shuffled(cfg.seed, step))


def token_weights(batch: Rollout, cfg: Config) -> Ragged:
    """The aggregation weight of every response token of a mini-batch; 0 under the mask and in uncounted rows."""
    return counted_weights(batch, settings_of(cfg).aggregation, cfg.rollout.max_new_tokens)
