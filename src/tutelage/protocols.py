"""What a loss, an engine, a rollout backend, a reward source, a handle, a transport and an algorithm are.

Layer 0: Protocols only.  Implementations live in the layers above and never inherit from each other.
Shapes: B sequences, R flat response tokens, N items of a loss (a token, a sequence or a pair), K scalars per item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tutelage.layout import RoleBuilder
from tutelage.types import Outputs, Prompts, Ragged, Rollout, Sequences, Stats


@runtime_checkable
class SeparableLoss(Protocol):
    """sum over items of weight * item.  Weights are global to the mini-batch: any cut sums to the same gradient.

    outputs  what the model must compute: names of the fields of `types.Outputs`.
    weights  once, on the whole mini-batch: Ragged whose rows are the B items (tokens of a sequence, or one entry).
    items    on any selection of items: (N,) losses in the order of `weights(selection)`, and named statistics.
    """

    @property
    def outputs(self) -> frozenset[str]: ...
    def weights(self, batch: Any) -> Ragged: ...
    def items(self, out: Outputs, batch: Any) -> tuple[Tensor, Stats]: ...


@runtime_checkable
class CoupledLoss(Protocol):
    """A loss of statistics of the whole mini-batch, in two passes (see `math.coupled`).

    scalars  on any selection of items: (items, K), differentiable in the model's outputs.
    couple   on the whole mini-batch: a scalar loss as a differentiable function of all (B, K) scalars, and statistics.
    """

    @property
    def outputs(self) -> frozenset[str]: ...
    def scalars(self, out: Outputs, batch: Any) -> Tensor: ...
    def couple(self, scalars_BK: Tensor, batch: Any) -> tuple[Tensor, Stats]: ...


Loss = SeparableLoss | CoupledLoss


@runtime_checkable
class NoisyLoss(Protocol):
    """A loss whose training passes have noise on the input embeddings, where `noise_alpha` is not None.

    noise_keys  on any selection of items: (sequences,) int64, what keys the noise of each sequence.
    """

    noise_alpha: float | None

    def noise_keys(self, batch: Any) -> Tensor: ...


class Engine(Protocol):
    """A model, its optimiser, and the ways to run them; everything in and out is ragged.

    logprobs   Ragged (R): logits divided by `temperature`, dropout off, no gradient.
    log_collisions  Ragged (R): log sum_v p_v^2 of the same distributions.
    top_logprobs    Ragged (R) logprobs, (R, count) ids and logprobs of the likeliest tokens among ids 0 .. below - 1.
    values     Ragged (R + B): V before each response token and one value after the last.
    logprobs_and_values  both from one pass, of a policy with a value head on its trunk.
    scores     (B,): one scalar per sequence, at its last real token.
    token_scores    Ragged (R): one scalar per response token, with the token read.
    step       one optimiser update on one mini-batch: micro-batches, summed gradients, clipping; returns statistics.
    save_state, load_state   everything a later step depends on, in a folder that any number of ranks can read.
    """

    def logprobs(self, sequences: Sequences, temperature: float, adapter: bool = True) -> Ragged: ...
    def log_collisions(self, sequences: Sequences, temperature: float, adapter: bool = True) -> Ragged: ...
    def top_logprobs(
        self, sequences: Sequences, count: int, temperature: float, below: int | None = None
    ) -> tuple[Ragged, Ragged, Ragged]: ...
    def values(self, sequences: Sequences) -> Ragged: ...
    def logprobs_and_values(self, sequences: Sequences, temperature: float) -> tuple[Ragged, Ragged]: ...
    def scores(self, sequences: Sequences) -> Tensor: ...
    def token_scores(self, sequences: Sequences) -> Ragged: ...
    def step(self, batch: Any, loss: Loss) -> Stats: ...
    def evaluate(self, batch: Any, loss: Loss) -> Stats: ...
    def save_state(self, folder: Path) -> None: ...
    def load_state(self, folder: Path) -> None: ...
    def checkpoint_bytes(self) -> int: ...
    def named_weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def save_pretrained(self, folder: Path) -> None: ...


class RolloutEngine(Protocol):
    """Generates: every sample's randomness is keyed by (seed, step, prompt id, sample index, purpose)."""

    def generate(self, prompts: Prompts) -> Rollout: ...
    def publish(self, version: int) -> None:
        """New weights are in place, or are put in place; later rollouts carry this version."""
        ...

    def rest(self) -> None:
        """Training begins: give back what memory can be given back until the next `publish`."""
        ...


class RewardSource(Protocol):
    """Scores finished rollouts: (B,) float32, own units.  NaN or a wrong count raises RewardError naming the row."""

    name: str

    def score(self, rollout: Rollout) -> Tensor: ...


@dataclass(frozen=True)
class Turn:
    """What an environment says to a response.

    observation  text that the policy reads next, as a message of the role `role`; "" where `done`.
    reward       for this turn.
    done         the episode has ended.
    info         numbers for the metrics, such as {"tool_errors": 1.0}.
    """

    observation: str
    reward: float
    done: bool
    role: str = "user"
    info: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode.  Deterministic given the seed of `reset` and the responses.

    reset  begins an episode for a prompt: truth is the row's, seed is keyed by (seed, step, prompt id, sample).
    step   takes the response of one turn: its tokens, and their text without special tokens.
    """

    def reset(self, messages: Sequence[Mapping[str, str]], truth: Any, seed: int) -> None: ...
    def step(self, tokens: Sequence[int], text: str) -> Turn: ...


class Pending(Protocol):
    """A result that may not exist yet.  Any other access than these raises PendingError."""

    def adding(self, **columns: Any) -> Pending: ...
    def gather(self) -> Any: ...


class Transport(Protocol):
    """Decides where a call on a role runs: directly, on groups of remote ranks, or nowhere (recorded)."""

    def start(self, builder: RoleBuilder, roles: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Have the roles built where they will run; handles by name, and what the builder noted."""
        ...

    def handle(self, name: str, role: Any) -> Any:
        """A handle whose public methods return Pending and accept Pending arguments."""
        ...

    def put(self, value: Any) -> Pending:
        """A controller-side value as the start of a flow."""
        ...

    def call(self, function: Callable[..., Any], *args: Any, outputs: int = 1) -> tuple[Pending, ...]:
        """Controller mathematics as a node of the same flow, with `outputs` results."""
        ...

    def take_seconds(self) -> dict[tuple[str, str], float]:
        """Seconds spent in each (role, method) since the last call; controller mathematics has the role controller."""
        ...

    def take_busy(self) -> dict[str, float]:
        """Seconds that each pool worked since the last call."""
        ...

    def places(self) -> tuple[str, ...]:
        """Where the ranks of each pool run, in words; nothing for one process."""
        ...

    def lost(self) -> tuple[str, ...]:
        """Pools that take no calls until `restart`."""
        ...

    def restart(self, pool: str, /) -> tuple[str, ...]:
        """Start a pool again, its roles as the builder makes them, and what it notes."""
        ...

    def attach(self, folder: Path) -> None:
        """The run has a folder: it must be seen wherever roles run, and their output is kept in it."""
        ...

    def close(self) -> None:
        """Let go of every process and device."""
        ...


class Algorithm(Protocol):
    """Three functions in the order of the paper, with no I/O, timing or parallelism in them; a module is one.

    ROLES          the roles it uses.
    PREFIXES       trained role -> prefix of its metrics.
    PUBLISHED      roles whose new weights go to the rollout engine after each step.
    initial_state  of the first step; `state_from` makes one again from what its `state_dict` saved.  A state has
                   `step`, the steps taken before it.
    """

    ROLES: tuple[str, ...]
    PREFIXES: dict[str, str]
    PUBLISHED: tuple[str, ...]

    def initial_state(self, cfg: Any, /) -> Any: ...
    def state_from(self, saved: Mapping[str, Any], /) -> Any: ...
    def collect(self, batch: Any, roles: Any, cfg: Any, /) -> Any: ...
    def advantages(self, batch: Any, state: Any, cfg: Any, /) -> tuple[Any, Any, Stats]: ...
    def learn(self, batch: Any, roles: Any, cfg: Any, state: Any, /) -> list[dict[str, Any]]: ...


class BatchSource(Protocol):
    """Training data with a saved cursor: the same seed and cursor give the same batches."""

    def __iter__(self) -> Iterator[Any]: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...
    @property
    def steps(self) -> int: ...


class Tracker(Protocol):
    """Where metrics go besides metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...
